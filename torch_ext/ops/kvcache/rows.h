// Where the keys of every batch item of attention_with_kvcache are, from its index tensors.
#pragma once

#include <optional>

#include "ops/kvcache/kvcache.h"
#include "tensors/block_table.h"

namespace qkv::ops {

// One batch item.
struct CacheRow {
  int64_t row = 0;     // of the cache; not paged
  int64_t length = 0;  // how many keys there are before new ones are appended
  int64_t hidden = 0;  // the first ones, which are not seen
};

struct CacheRows {
  c10::SmallVector<CacheRow, 16> rows;  // [B]
  std::optional<BlockTable> table;      // paged
  int64_t new_rows = 0;                 // L_new
};

// Throws c10::Error for numbers that do not fit the cache, and where two of the rows that would be
// written are the same.
CacheRows cache_rows(const Call& call, const Sizes<int64_t>& sizes);

}  // namespace qkv::ops
