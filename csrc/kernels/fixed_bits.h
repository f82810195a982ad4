// Kernels whose results have the same bits on every CPU (docs/determinism.md), and for any number
// of queries at once. They are the same passes as all others, compiled once more
// (kernels/prelude.h) with these constants instead of the fastest ones, and without the compiler's
// freedom to fuse a product and a sum: it has -ffp-contract=off (cmake/kernels.cmake), and what has
// to be fused says so (multiply_add in simd/vec.h).
//
// What decides a bit, and what these kernels make of it, docs/kernels.md says: "The same bits".
#pragma once

#ifndef QKV_ISA  // this header is opened by itself
#include "kernels/prelude.h"
#define QKV_ISA generic
#endif

namespace qkv::QKV_ISA {

#ifdef QKV_FIXED_BITS
constexpr bool kFixedBits = true;
#else
constexpr bool kFixedBits = false;
#endif

// Blocks of keys have so many keys, and begin at multiples of them: a square of a map of masks
// (common/mask_map.h), so that no mask cuts a block in two.
constexpr int kFixedKeys = 64;
// Sums over keys are made of chains of so many additions, which begin at multiples of them.
constexpr int kSumChain = 16;
// Sums over the head dimension are made in the lanes of so many bytes, however long vectors are.
constexpr int kFixedBytes = 64;

}  // namespace qkv::QKV_ISA
