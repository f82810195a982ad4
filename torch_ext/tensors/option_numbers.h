// Options whose numbers are looked at where they are computed with, and nowhere else.
#pragma once

#include "attention.h"
#include "call/check.h"

namespace qkv {

// The option `shard`, where a call stands in a larger one. Sets problem.shard and
// problem.dropout_batch, or throws c10::ValueError if the call does not lie within the whole.
void bind_shard(const Call& call, const Sizes<int64_t>& sizes, Problem& problem);

// That 0 <= begin <= end <= S for each begin and end of the call's spans; throws c10::ValueError
// with the place of the first for which that does not hold. The kernels read nothing out of bounds
// for any numbers: this is so that mistakes are found.
void check_spans(const Call& call, const Sizes<int64_t>& sizes);

}  // namespace qkv
