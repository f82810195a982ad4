// The option `shard`: where a call stands in a larger one.
#pragma once

#include "attention.h"
#include "call/check.h"

namespace qkv {

// The largest number in it, so that no sum of a few of them overflows.
constexpr int64_t kLargestShard = int64_t{1} << 40;

// Sets problem.shard and problem.dropout_batch, or throws c10::ValueError if the call does not lie
// within the whole.
void bind_shard(const Call& call, const Sizes<int64_t>& sizes, Problem& problem);

}  // namespace qkv
