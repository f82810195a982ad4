// Every operator, on one page. Their kernels: cpu.cpp, meta.cpp, autograd.cpp,
// composite.cpp, other.cpp, isa.cpp; for torch.func.vmap: qkv/vmap.py.
#include <torch/library.h>

#include <string>
#include <vector>

TORCH_LIBRARY(qkv, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};

  // scaled_dot_product_attention's, in its order and with its defaults.
  const std::string arguments =
      "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "
      "bool is_causal=False, *, float? scale=None, bool enable_gqa=False)";
  m.def(("attention" + arguments + " -> Tensor").c_str(), tags);
  m.def(("attention_with_lse" + arguments + " -> (Tensor output, Tensor logsumexp)").c_str(), tags);

  // A gradient that output_mask does not ask for, or None for both incoming
  // gradients, gives None.
  m.def(
      "attention_backward(Tensor? grad_output, Tensor? grad_logsumexp, Tensor query, Tensor key, "
      "Tensor value, Tensor? attn_mask, Tensor output, Tensor logsumexp, float dropout_p, "
      "bool is_causal, *, float? scale, bool enable_gqa, bool[3] output_mask) "
      "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
      tags);

  // Behind qkv.active_isa(), qkv.supported_isas() and qkv.set_isa().
  m.def("_active_isa() -> str");
  m.def("_supported_isas() -> str[]");
  m.def("_set_isa(str name) -> ()");
}
