#include "qkv/attention.h"

#include "ops.h"

namespace qkv {

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const AttentionOptions& options) {
  return ops::attention({query, key, value, options});
}

std::tuple<at::Tensor, at::Tensor> attention_with_lse(const at::Tensor& query,
                                                      const at::Tensor& key,
                                                      const at::Tensor& value,
                                                      const AttentionOptions& options) {
  return ops::attention_with_lse({query, key, value, options});
}

}  // namespace qkv
