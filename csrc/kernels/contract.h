// What an instruction set must promise. isa/<name>/vec.h chooses these constants for speed; the
// kernels rely on more than that, and with constants that break it they would compile and then
// write outside of their memory, never end, or multiply the wrong rows.
#pragma once

#include "kernels/gemm/gemm.h"
#include "kernels/operands/tile.h"

namespace qkv::QKV_ISA {

static_assert(kVectorBytes >= 16 && (kVectorBytes & (kVectorBytes - 1)) == 0,
              "Vectors are transposed by halving squares (exchange), and masks 16 bytes at a time: "
              "kVectorBytes must be a power of two, and at least 16");

static_assert(kGradRows % kTileRows<float> == 0 && kGradRows % kTileRows<double> == 0,
              "The backward pass takes kGradRows rows at a time and keeps kGradRows / kTileRows "
              "tiles of them (BackwardRows), so tiles must fill such a block without a remainder: "
              "kVectorBytes must be at most 128");

static_assert(kVectorsInStep >= 2 && kVectorsInStep % 2 == 0,
              "The softmax takes the exponentials of kVectorsInStep / 2 keys of a tile two vectors "
              "wide in step (softmax_tile). Of 0 keys it would never end, and of an odd number of "
              "vectors one would be left");

static_assert(kGradRows % (kVectorsInStep * kLanes<double>) == 0,
              "The backward pass takes one exponential for each of kGradRows rows, in double, "
              "kVectorsInStep vectors at a time (split_lse): with a remainder it would write past "
              "their end");

static_assert(kMaxRows[0] >= 1 && kMaxRows[1] >= 1 && kMaxRows[0] <= 32 && kMaxRows[1] <= 32,
              "A micro-kernel has as many rows as its loops are unrolled times at most "
              "(QKV_UNROLL): more accumulators would be spilled, and of none there is no kernel");

static_assert(kKeyStep % 2 == 0,
              "Blocks of keys are multiples of kKeyStep (key_step). Where bf16 is multiplied in "
              "pairs, a block must begin with a pair (KeyOperand::columns), at an even key");

static_assert(kKeyBlock <= kLongestChain || kKeyStep != kMaxRows[1],
              "The keys of a tile are the depth of the second product, which is one chain of "
              "additions: of more keys, gemm would cut it and round otherwise. Tiles of AMX end a "
              "chain every 32");

}  // namespace qkv::QKV_ISA
