// attention_with_kvcache, and varlen_attention on pages: keys and values that lie in a cache.
#pragma once

#include <vector>

#include "attention.h"
#include "check.h"

namespace qkv {

// The arguments of attention_with_kvcache.
struct KvCache {
  Forward forward;          // key and value: k_cache and v_cache
  const at::Tensor& key;    // undefined: nothing to append
  const at::Tensor& value;  // likewise
  const at::Tensor& cache_seqlens;
  const at::Tensor& cache_batch_idx;
  const at::Tensor& cache_leftpad;
  const at::Tensor& block_table;  // undefined: not paged

  bool is_paged() const { return block_table.defined(); }
  bool appends() const { return key.defined(); }
};

// The arguments of varlen_attention_paged.
struct PagedVarlen {
  Forward forward;
  const at::Tensor& block_table;
};

// That the tensors are dense and on one device.
void check_tensors(const KvCache& call);
void check_tensors(const PagedVarlen& call);

// Throw c10::Error for shapes, dtypes and options that do not fit. seqlen_k is the most keys that a
// sequence can have. The numbers in index tensors are not looked at.
template <class T>
Sizes<T> check(const KvCache& call);
template <class T>
Sizes<T> check(const PagedVarlen& call);

// The blocks that each sequence needs, checked and copied.
class BlockTable {
 public:
  // Sequence n has lengths[n] keys. Throws c10::Error where `block_table` is too short, or where
  // one of these blocks is not among the `blocks` of the argument `pool`.
  BlockTable(const char* op, const char* pool, const at::Tensor& block_table, int64_t blocks,
             int64_t block_size, c10::ArrayRef<int64_t> lengths);

  const int32_t* operator[](int64_t n) const { return &blocks_[begins_[n]]; }

 private:
  std::vector<int32_t> blocks_;  // not empty: no sequence gets a null pointer
  std::vector<int64_t> begins_;
};

namespace kvcache {

// Through the dispatcher.
OutputAndLse attention_with_kvcache(const KvCache& call);
OutputAndLse attention_with_kvcache(c10::DispatchKeySet keys, const KvCache& call);
OutputAndLse varlen_attention_paged(const PagedVarlen& call);
OutputAndLse varlen_attention_paged(c10::DispatchKeySet keys, const PagedVarlen& call);

// All arguments as the dispatcher passes them.
KvCache args(const at::Tensor& query, const at::Tensor& k_cache, const at::Tensor& v_cache,
             const OptionalTensor& key, const OptionalTensor& value,
             const OptionalTensor& cache_seqlens, const OptionalTensor& cache_batch_idx,
             const OptionalTensor& cache_leftpad, const OptionalTensor& block_table,
             std::optional<double> softmax_scale, bool causal,
             at::OptionalSymIntArrayRef window_size, double softcap,
             const OptionalTensor& alibi_slopes, const OptionalTensor& sinks);
PagedVarlen paged_varlen_args(const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, const at::Tensor& cu_seq_q,
                              const OptionalTensor& cu_seq_k, const at::Tensor& seqused_k,
                              const at::Tensor& block_table, std::optional<double> scale,
                              at::OptionalSymIntArrayRef window_size, bool enable_gqa,
                              double softcap, const OptionalTensor& alibi_slopes,
                              const OptionalTensor& sinks);

}  // namespace kvcache
}  // namespace qkv
