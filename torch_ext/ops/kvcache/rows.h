// Where the keys of every batch item of attention_with_kvcache are, from its index tensors.
#pragma once

#include <optional>

#include "attention.h"
#include "ops/kvcache/kvcache.h"
#include "tensors/block_table.h"

namespace qkv::ops {

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

}  // namespace qkv::ops
