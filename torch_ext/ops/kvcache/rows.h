// Where the keys of a cache are, from the index tensors of a call.
#pragma once

#include <optional>
#include <vector>

#include "attention.h"
#include "ops/kvcache/kvcache.h"

namespace qkv::ops {

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

// Where the keys of every batch item of attention_with_kvcache are.
struct CacheRows {
  std::vector<Span> spans;          // [B]: of the keys that are seen, the new ones included
  std::optional<BlockTable> table;  // paged: what the spans' pages are in
  int64_t new_rows = 0;             // L_new

  // How many keys batch item b has before new ones are appended.
  int64_t length(int64_t b) const { return spans[b].key_begin + spans[b].seqlen_k - new_rows; }
};

// Throws c10::Error for numbers that do not fit the cache, and where two of the rows that would be
// written are the same.
CacheRows cache_rows(const Call& call, const Sizes<int64_t>& sizes);

// Copies key and value behind the keys and values that the cache has; to int8 caches as int8.
// Throws c10::Error, before anything is written, unless the caches are memory of their own.
void append(const Call& call, const CacheRows& rows, int num_threads);

}  // namespace qkv::ops
