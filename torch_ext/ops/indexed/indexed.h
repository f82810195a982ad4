// qkv::indexed_attention: attention to keys that are chosen for each query.
#pragma once

#include <vector>

#include "call/call.h"

namespace qkv::ops {

// The results of attention, of a call with `indices`, in one of three ways: by a mask, which does
// everything; by pages of one key each, which is fast, but has no gradients; by blocks of queries.
Tensors attend_to_indices(const Call& call);

// The keys that queries see of those chosen for them, read from `indices`: B batch items, G groups
// of heads that share a choice (1, or one for each key head), L queries and S keys.
struct ChosenKeys {
  // int64 [B * G * L, k]: of each query first those that it sees, rising: rows that are read in the
  // order of memory take a quarter less time than in any order (one query, f32, Zen 4). Keys of all
  // items and groups are counted on: those of the first are 0 to S - 1.
  at::Tensor keys;
  at::Tensor counts;  // int64 [B * G * L]: how many those are
};

// Of a call with query [B, H, L, D] whose numbers may be read, and whose attn_mask is None or bool,
// the same for all heads. is_causal, window_size and attn_mask hide; a key that is named twice
// counts once, and negative numbers name none. Throws c10::Error for a number of S or more.
ChosenKeys chosen_keys(const Call& call);

// A run of queries of one batch item that share the keys which any of them has chosen.
struct ChosenBlock {
  int64_t item, begin, end;  // its queries
  at::Tensor keys;           // int64 [n], rising
  at::Tensor mask;           // bool [end - begin, n]: which of them each query sees
};
// Of one group, with L queries.
std::vector<ChosenBlock> blocks_of_queries(const ChosenKeys& chosen, int64_t L, int64_t seqlen_k);

}  // namespace qkv::ops
