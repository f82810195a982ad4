// Every operator, on one page. Their kernels: composite.cpp, merge.cpp, autograd*.cpp, cpu_*.cpp,
// meta.cpp, other.cpp, isa.cpp; for torch.func.vmap: qkv/vmap.py.
#include <torch/library.h>

#include <string>
#include <vector>

TORCH_LIBRARY(qkv, m) {
  using std::string;
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  const auto def = [&](const string& schema) { m.def(schema.c_str(), tags); };

  // For users: scaled_dot_product_attention's arguments, in its order and with its defaults,
  // then ours.
  const string options =
      "float? scale=None, bool enable_gqa=False, SymInt[2]? window_size=None, float softcap=0.0, "
      "Tensor? alibi_slopes=None, Tensor? sinks=None";
  const string arguments =
      "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "
      "bool is_causal=False, *, " +
      options + ")";
  def("attention" + arguments + " -> Tensor");
  def("attention_with_lse" + arguments + " -> (Tensor output, Tensor logsumexp)");

  // N documents one after the other: see attention_forward. With block_table, see
  // varlen_attention_paged.
  def("varlen_attention(Tensor query, Tensor key, Tensor value, Tensor cu_seq_q, Tensor? cu_seq_k, "
      "SymInt max_q, SymInt max_k, *, float dropout_p=0.0, float? scale=None, "
      "SymInt[2]? window_size=None, bool enable_gqa=False, Tensor? seqused_k=None, "
      "Tensor? block_table=None, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None) "
      "-> (Tensor output, Tensor logsumexp)");
  def("attention_weights(Tensor query, Tensor key, Tensor? attn_mask=None, float dropout_p=0.0, "
      "bool is_causal=False, *, " +
      options + ", str? reduce=None) -> Tensor");
  def("hard_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
      "bool is_causal=False, *, float? scale=None, bool enable_gqa=False, "
      "SymInt[2]? window_size=None, float softcap=0.0, Tensor? alibi_slopes=None, "
      "bool straight_through=False) -> (Tensor output, Tensor index)");

  // Attention over parts of the keys, put together: [..., H, L, Dv] and [..., H, L] of each.
  def("merge(Tensor[] outputs, Tensor[] lses) -> (Tensor output, Tensor logsumexp)");

  // For inference: appends key and value [B, Hkv, L_new, *] to the caches, in place, then attends
  // to them. The caches are [rows, Hkv, S_max, *] or, with block_table [B, blocks of a sequence],
  // [blocks, Hkv, block size, *].
  const string paged_options =
      "float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None) "
      "-> (Tensor output, Tensor softmax_lse)";
  def("attention_with_kvcache(Tensor query, Tensor(a!) k_cache, Tensor(b!) v_cache, "
      "Tensor? key=None, Tensor? value=None, *, Tensor? cache_seqlens=None, "
      "Tensor? cache_batch_idx=None, Tensor? cache_leftpad=None, Tensor? block_table=None, "
      "float? softmax_scale=None, bool causal=False, SymInt[2]? window_size=None, " +
      paged_options);
  // varlen_attention with block_table [N, blocks of a document]: key and value are
  // [blocks, block size, Hkv, *], document n has the first seqused_k[n] keys of its blocks.
  def("varlen_attention_paged(Tensor query, Tensor key, Tensor value, Tensor cu_seq_q, "
      "Tensor? cu_seq_k, Tensor seqused_k, Tensor block_table, *, float? scale=None, "
      "SymInt[2]? window_size=None, bool enable_gqa=False, " +
      paged_options);

  // What they are made of. cu_seq_q [N + 1]: query [T, H, D], key and value [Tk, Hkv, D] are N
  // documents one after the other, logsumexp is [H, T]. Which weights dropout keeps follows from
  // dropout_seed, so that it is drawn when a compiled program runs, and is the same again in the
  // backward pass.
  const string tensors =
      "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? alibi_slopes, "
      "Tensor? sinks, Tensor? dropout_seed, Tensor? cu_seq_q, Tensor? cu_seq_k, "
      "Tensor? seqused_k";
  const string scores =
      "float dropout_p, bool is_causal, float? scale, bool enable_gqa, SymInt[2]? window_size, "
      "float softcap";
  // A gradient that output_mask does not ask for, or that has no argument, is None.
  const string gradients =
      "bool[6] output_mask) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, "
      "Tensor grad_attn_mask, Tensor grad_alibi_slopes, Tensor grad_sinks)";
  m.def("dropout_seed(Tensor query) -> Tensor",
        {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
  def("attention_forward(" + tensors + ", *, " + scores + ") -> (Tensor output, Tensor logsumexp)");
  def("attention_backward(Tensor? grad_output, Tensor? grad_logsumexp, " + tensors +
      ", Tensor output, Tensor logsumexp, *, " + scores + ", " + gradients);

  const string weights =
      "Tensor query, Tensor key, Tensor? attn_mask, Tensor? alibi_slopes, Tensor? sinks, "
      "Tensor? dropout_seed";
  def("weights_forward(" + weights + ", *, " + scores +
      ", str? reduce) -> (Tensor weights, Tensor logsumexp)");
  def("weights_backward(Tensor grad_weights, " + weights + ", Tensor logsumexp, *, " + scores +
      ", str? reduce, " + gradients);

  const string hard =
      "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? alibi_slopes";
  const string hard_scores =
      "bool is_causal, float? scale, bool enable_gqa, SymInt[2]? window_size, float softcap, "
      "bool straight_through";
  def("hard_forward(" + hard + ", *, " + hard_scores + ") -> (Tensor output, Tensor index)");
  def("hard_backward(Tensor grad_output, " + hard + ", Tensor index, *, " + hard_scores + ", " +
      gradients);

  // Behind qkv.active_isa(), qkv.supported_isas() and qkv.set_isa().
  m.def("_version() -> str");
  m.def("_active_isa() -> str");
  m.def("_supported_isas() -> str[]");
  m.def("_set_isa(str name) -> ()");
  // Behind qkv.half_products() and qkv.set_half_products().
  m.def("_half_products() -> str");
  m.def("_set_half_products(str name) -> ()");
}
