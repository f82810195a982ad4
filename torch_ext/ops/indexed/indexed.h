// qkv::indexed_attention: attention to keys that are chosen for each query.
#pragma once

#include "call/call.h"

namespace qkv::ops {

// The results of attention, of a call with `indices`, in one of three ways: by a mask, which does
// everything; by pages of one key each, which is fast, but has no gradients; by blocks of queries.
Tensors attend_to_indices(const Call& call);

}  // namespace qkv::ops
