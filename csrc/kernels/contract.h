// What an instruction set must promise. isa/<name>/vec.h chooses these constants for speed; the
// kernels rely on more than that. With constants that break a rule below they would compile, and
// then write outside of their memory, never end, multiply the wrong rows, or be slow.
//
// What the constants of vec.h are, isa/generic/vec.h says, and what its functions must do,
// isa/generic/functions.h, which has all of them.
#pragma once

#include "kernels/gemm/gemm.h"
#include "kernels/operands/tile.h"
#include "kernels/passes/forward_few_rows.h"
#include "kernels/simd/vec.h"
#include "repair/counts.h"

namespace qkv::QKV_ISA {

// Vectors.

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "The lower half of a lane is taken for the first of two smaller ones, by dropout "
              "(Dropout::kept) and by pairs of bf16 (pairs.h): memory must be little-endian");

static_assert(
    kVectorBytes >= 16 && (kVectorBytes & (kVectorBytes - 1)) == 0,
    "Vectors are transposed by halving squares (exchange), and boolean masks read 16 bytes "
    "at a time (load_bits): kVectorBytes must be a power of two, and at least 16");

static_assert(kTileRows<float> <= 32, "A boolean mask has a bit of 32 for each row (load_bits)");

static_assert(!kTiles || kVectorBytes == 64,
              "A row of one of AMX's tiles is 64 bytes, and tiles take the place of vectors, whose "
              "lanes they must have: kVectorBytes must be 64");

// Rows. A tile has kTileRows rows, two vectors of them.

static_assert(kGradRows % kTileRows<float> == 0 && kGradRows % kTileRows<double> == 0,
              "The backward pass takes kGradRows rows at a time and keeps kGradRows / kTileRows "
              "tiles of them (BackwardRows), and pairs round as many rows at once as a tile has "
              "(narrow_rows), so tiles must fill a block of rows without a remainder: "
              "kVectorBytes must be at most 128");

static_assert(kVectorsInStep >= 2 && kVectorsInStep % 2 == 0,
              "The softmax takes the exponentials of kVectorsInStep / 2 keys of a tile two vectors "
              "wide in step (softmax_tile). Of 0 keys it would never end, and of an odd number of "
              "vectors one would be left");

static_assert(!kLooksUp || (kHasFma && kLanes<float> == 16),
              "The table of exponentials has 16 numbers, one in each lane, and what is left of the "
              "exponent is taken with FMA (exp_table.h, split_exponent)");

// Micro-kernels. kMaxRows[n] is for those that are n + 1 vectors wide.

static_assert(kMaxRows[0] >= 1 && kMaxRows[1] >= 1 && kMaxRows[0] <= 32 && kMaxRows[1] <= 32,
              "A micro-kernel has as many rows as its loops are unrolled times at most "
              "(QKV_UNROLL): more accumulators would be spilled, and of none there is no kernel");

static_assert(kMaxRows[0] + 1 + 1 <= kRegisters && 2 * kMaxRows[1] + 2 + 1 <= kRegisters,
              "Accumulators, the vectors of a row of B and one element of A must fit into the "
              "kRegisters registers: spilled accumulators cost half the speed");

static_assert(kMaxRows[0] >= 8 && 2 * kMaxRows[1] >= 8,
              "With fewer than 8 accumulators two units for multiply-adds, whose latency is 4, "
              "would wait for their own results");

// Keys. A block of keys has at most kKeyBlock of them, and is a multiple of kKeyStep (key_step).

static_assert(kKeyStep % 2 == 0,
              "Where bf16 is multiplied in pairs, a block of keys must begin with a pair "
              "(KeyOperand::columns), at an even key, and so must have an even number of keys");

static_assert(
    kFixedBits || (kKeyStep <= kKeyBlock && kKeyBlock % kKeyStep == 0),
    "Blocks of keys are whole steps (key_step), and scratch memory has room for kKeyBlock "
    "keys: a block of one step must fit");

static_assert(kFixedBits || kFewTileKeys <= kKeyBlock,
              "Planes of few rows take kFewTileKeys keys at a time where options work on them "
              "(ForwardFewRows), whose scores lie in memory for kKeyBlock keys (ForwardScratch)");

static_assert(
    kFewPad >= few_places_at_once(kFewAtOnce<float, 1>) &&
        kFewPad >= few_places_at_once(kFewAtOnce<double, 1>),
    "A product of few rows takes kFewAtOnce keys at a time: a row of scores must have room for "
    "those beyond the last key");

static_assert(kFewPortion<float> <= kFewSums<float> && kFewPortion<double> <= kFewSums<double>,
              "dot_rows makes the sums of all rows of a portion and at least one key in registers");

static_assert(kKeyBlock <= kLongestChain || kTiles,
              "The keys of a tile are the depth of the second product, which is one chain of "
              "additions: of more keys, gemm would cut it and round otherwise. Tiles of AMX end a "
              "chain every 32");

static_assert(kKeyBlock < kMinusInfinityCode && kGradRows < kMinusInfinityCode,
              "Where numbers are not finite, the sum over a block of keys or of rows counts "
              "infinities of one sign below the code of those of the other (counts.h)");

}  // namespace qkv::QKV_ISA
