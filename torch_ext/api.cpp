#include "composite.h"
#include "qkv/attention.h"

namespace qkv {
namespace {

Forward call_of(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                const AttentionOptions& o) {
  Options options{o.dropout_p(), o.is_causal(), o.scale(), o.enable_gqa(), {-1, -1}, o.softcap()};
  if (o.window_size()) options.window_size = {(*o.window_size())[0], (*o.window_size())[1]};
  return {"attention",
          {&query, &key, &value, &tensor_of(o.attn_mask()), &tensor_of(o.alibi_slopes()),
           &tensor_of(o.sinks()), &kNone, &kNone, &kNone, &kNone},
          options};
}

}  // namespace

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const AttentionOptions& options) {
  return composite::attention(call_of(query, key, value, options));
}

std::tuple<at::Tensor, at::Tensor> attention_with_lse(const at::Tensor& query,
                                                      const at::Tensor& key,
                                                      const at::Tensor& value,
                                                      const AttentionOptions& options) {
  return composite::attention_with_lse(call_of(query, key, value, options));
}

}  // namespace qkv
