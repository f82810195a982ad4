// What the numbers of spans may be.
#pragma once

#include <limits>

#include "call/call.h"

namespace qkv {

constexpr int64_t kMaxSpan = std::numeric_limits<int32_t>::max();

// That 0 <= begin <= end <= seqlen_k for each begin and end of the call's spans; throws
// c10::ValueError with the place of the first for which that does not hold. The kernels read
// nothing out of bounds for any numbers: this is so that mistakes are found.
void check_spans(const Call& call, int64_t seqlen_k);

}  // namespace qkv
