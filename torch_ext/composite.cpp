// Dispatch key CompositeImplicitAutograd: qkv::attention, which is
// attention_with_lse on the CPU and torch's own attention elsewhere.
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/library.h>

#include "check.h"

namespace qkv {
namespace {

at::Tensor torch_attention(const Forward& call) {
  const AttentionOptions& o = call.options;
  TORCH_CHECK_NOT_IMPLEMENTED(!(o.attn_mask() && o.is_causal()), "attention: query is on ",
                              call.query.device(),
                              ", where torch's attention computes the result, "
                              "and that cannot combine attn_mask with is_causal; pass one mask");
  return at::scaled_dot_product_attention(call.query, call.key, call.value, o.attn_mask(),
                                          o.dropout_p(), o.is_causal(), o.scale(), o.enable_gqa());
}

at::Tensor forward_composite(const Forward& call) {
  check_tensors(call);
  const at::Device device = call.query.device();
  if (!device.is_cpu() && !device.is_meta()) return torch_attention(call);
  return std::get<0>(ops::attention_with_lse(call));
}

}  // namespace

TORCH_LIBRARY_IMPL(qkv, CompositeImplicitAutograd, m) {
  m.impl("attention", ops::forward<&forward_composite>);
}

}  // namespace qkv
