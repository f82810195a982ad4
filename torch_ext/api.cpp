#include "composite.h"
#include "ops.h"
#include "qkv/attention.h"

namespace qkv {
namespace {

// Refers to tensors of `o`.
Forward call_of(const char* op, const at::Tensor& query, const at::Tensor& key,
                const at::Tensor& value, const AttentionOptions& o) {
  Options options{o.dropout_p(), o.is_causal(), o.scale(), o.enable_gqa(), {-1, -1}, o.softcap()};
  if (o.window_size()) options.window_size = {(*o.window_size())[0], (*o.window_size())[1]};
  return {op,
          {&query, &key, &value, &tensor_of(o.attn_mask()), &tensor_of(o.alibi_slopes()),
           &tensor_of(o.sinks()), &kNone, &kNone, &kNone, &kNone},
          options};
}

}  // namespace

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const AttentionOptions& options) {
  return composite::attention(call_of("attention", query, key, value, options));
}

std::tuple<at::Tensor, at::Tensor> attention_with_lse(const at::Tensor& query,
                                                      const at::Tensor& key,
                                                      const at::Tensor& value,
                                                      const AttentionOptions& options) {
  return composite::attention_with_lse(call_of("attention", query, key, value, options));
}

std::tuple<at::Tensor, at::Tensor> varlen_attention(const at::Tensor& query, const at::Tensor& key,
                                                    const at::Tensor& value,
                                                    const at::Tensor& cu_seq_q,
                                                    const std::optional<at::Tensor>& cu_seq_k,
                                                    const AttentionOptions& options,
                                                    const std::optional<at::Tensor>& seqused_k,
                                                    const std::optional<at::Tensor>& block_table) {
  Forward call = call_of("varlen_attention", query, key, value, options);
  call.tensors[kCuSeqQ] = &cu_seq_q;
  call.tensors[kCuSeqK] = &tensor_of(cu_seq_k);
  call.tensors[kSequsedK] = &tensor_of(seqused_k);
  return composite::varlen_attention(call, tensor_of(block_table));
}

at::Tensor attention_weights(const at::Tensor& query, const at::Tensor& key,
                             const AttentionOptions& options,
                             std::optional<std::string_view> reduce) {
  Forward call = call_of("attention_weights", query, key, kNone, options);
  call.has_value = false;
  return composite::attention_weights({call, ops::reduce_of(reduce)});
}

std::tuple<at::Tensor, at::Tensor> hard_attention(const at::Tensor& query, const at::Tensor& key,
                                                  const at::Tensor& value,
                                                  const AttentionOptions& options,
                                                  bool straight_through) {
  TORCH_CHECK_VALUE(options.dropout_p() == 0, "hard_attention: dropout_p is ", options.dropout_p(),
                    ", but 0 is expected: there is no dropout");
  TORCH_CHECK(!options.sinks(),
              "hard_attention: sinks is given, but nullopt is expected: "
              "sinks do not take part");
  return composite::hard_attention(
      {call_of("hard_attention", query, key, value, options), straight_through});
}

}  // namespace qkv
