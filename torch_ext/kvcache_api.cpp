#include "kvcache.h"
#include "qkv/kvcache.h"

namespace qkv {

std::tuple<at::Tensor, at::Tensor> attention_with_kvcache(const at::Tensor& query,
                                                          const at::Tensor& k_cache,
                                                          const at::Tensor& v_cache,
                                                          const std::optional<at::Tensor>& key,
                                                          const std::optional<at::Tensor>& value,
                                                          const KvCacheOptions& o) {
  std::array<c10::SymInt, 2> window = {-1, -1};
  if (o.window_size()) window = {(*o.window_size())[0], (*o.window_size())[1]};
  return kvcache::attention_with_kvcache(
      kvcache::args(query, k_cache, v_cache, key, value, o.cache_seqlens(), o.cache_batch_idx(),
                    o.cache_leftpad(), o.block_table(), o.softmax_scale(), o.causal(),
                    c10::SymIntArrayRef(window), o.softcap(), o.alibi_slopes(), o.sinks()));
}

}  // namespace qkv
