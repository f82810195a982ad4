// Where the keys of a cache are, from the index tensors of a call.
#pragma once

#include <vector>

#include "attention.h"
#include "ops/kvcache/kvcache.h"

namespace qkv::ops {

// Where the keys of every batch item of attention_with_kvcache are.
struct CacheRows {
  std::vector<Span> spans;     // [B]: of the keys that are seen, the new ones included
  std::vector<int32_t> pages;  // paged: what the spans' pages are in
  int64_t new_rows = 0;        // L_new

  // How many keys batch item b has before new ones are appended.
  int64_t length(int64_t b) const { return spans[b].key_begin + spans[b].seqlen_k - new_rows; }
};

// Throws c10::Error for numbers that do not fit the cache, and where two of the rows that would be
// written are the same.
CacheRows cache_rows(const Call& call, const Sizes<int64_t>& sizes);

// Sets the pages of sequences that have the keys of `spans`, in blocks of `block_size` rows, from
// the call's block_table, and returns what they point into. Throws c10::Error where the table is
// too short, or where one of these blocks is not among those of key.
std::vector<int32_t> set_pages(const Call& call, int64_t block_size, std::vector<Span>& spans);

// Copies key and value behind the keys and values that the cache has; to int8 caches as int8.
// Throws c10::Error, before anything is written, unless the caches are memory of their own.
void append(const Call& call, const CacheRows& rows, int num_threads);

}  // namespace qkv::ops
