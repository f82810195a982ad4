// qkv::varlen_attention: documents one after the other. What computes it is attention_forward or,
// for keys and values in pages, varlen_attention_paged (ops/kvcache).

#include "autograd/run.h"
#include "call/from_options.h"
#include "ops/attention/attention.h"
#include "ops/kvcache/kvcache.h"
#include "qkv/attention.h"

namespace qkv {
namespace ops {
namespace {

// The kernels read the lengths themselves: the largest ones are only checked, where known.
void check_largest(const Call& call, Option option, const c10::SymInt& size) {
  TORCH_CHECK_VALUE(size.maybe_as_int().value_or(0) >= 0, call.title(), ": ", call.name_of(option),
                    " is ", size, ", but the largest number of rows of a document is expected");
}

Tensors attend_to_pages(const Call& call) {
  TORCH_CHECK_VALUE(call.options.dropout_p == 0, call.title(), ": dropout_p is ",
                    call.options.dropout_p,
                    ", but 0 is expected with block_table, which is for inference only");
  TORCH_CHECK(!call.has(arg::attn_mask), call.title(),
              ": attn_mask is given, but None is expected with block_table");
  TORCH_CHECK(call.has(arg::seqused_k), call.title(),
              ": block_table is given, but seqused_k is None; expected how many keys of its blocks "
              "each document has");
  if (is_int8(call)) return run_cast(call.as(varlen_attention_paged), {arg::query});
  return run_cast(call.as(varlen_attention_paged));
}

Tensors varlen_composite(const Call& call) {
  check_query(call);
  TORCH_CHECK(call.is_packed(), call.op->title, ": cu_seq_q is an undefined tensor");
  check_largest(call, opt::max_q, call.options.max_q);
  check_largest(call, opt::max_k, call.options.max_k);
  if (call.has(arg::block_table)) return attend_to_pages(call);
  for (const Argument scale : {arg::key_scale, arg::value_scale})
    TORCH_CHECK(!call.has(scale), call.title(), ": ", call.name_of(scale),
                " is given, but block_table is None; int8 keys and values are expected in blocks");
  return attend(call);
}

DefinedOperator varlen(
    "varlen_attention",
    "varlen_attention(query, key, value, cu_seq_q, cu_seq_k?, max_q, max_k, *, "
    "dropout_p=, scale=, window_size=, enable_gqa=, seqused_k?=, block_table?=, " QKV_SCORE_KEYWORDS
    ", sinks?=, k_scale?= as key_scale, v_scale?= as value_scale, " QKV_PROGRAM_KEYWORDS
    ") -> output, logsumexp",
    {.composite = &varlen_composite});

}  // namespace
}  // namespace ops

std::tuple<at::Tensor, at::Tensor> varlen_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& cu_seq_q, const std::optional<at::Tensor>& cu_seq_k,
    const AttentionOptions& options, const std::optional<at::Tensor>& seqused_k,
    const std::optional<at::Tensor>& block_table, const std::optional<at::Tensor>& k_scale,
    const std::optional<at::Tensor>& v_scale) {
  Call call = call_of(ops::varlen, query, key, value, options);
  call.set(arg::cu_seq_q, cu_seq_q);
  call.set(arg::cu_seq_k, tensor_of(cu_seq_k));
  call.set(arg::seqused_k, tensor_of(seqused_k));
  call.set(arg::block_table, tensor_of(block_table));
  call.set(arg::key_scale, tensor_of(k_scale));
  call.set(arg::value_scale, tensor_of(v_scale));
  return pair_of(ops::varlen_composite(call));
}

}  // namespace qkv
