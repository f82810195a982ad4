// Products for planes of few rows, as in decoding. Here a vector runs along the head dimension, so
// that each element of a key and of a value is loaded once for all rows. With a row in each lane,
// as elsewhere, most lanes would be idle, and every element would have to be broadcast.
//
// Scores are made in few_dots.h, and sums of values in few_values.h. Numbers of 16 bits may be
// multiplied in pairs (few_words.h).
//
// Scores and weights of a block of keys are a matrix [rows x keys], of which rows are kFewStep
// elements apart: so the softmax has keys in its lanes (score/few_softmax.h).
#pragma once

#include "kernels/products/few_ahead.h"

namespace qkv::QKV_ISA {

// How many sums a product has in registers: all but four, which hold what is multiplied, and no
// more than 16. Eight keep two FMA units of latency 4 busy, but just so: sums of values by twelve
// are 1.1 times as fast on a Zen 3.
template <class T>
constexpr int kFewSums = std::max<int>(kLanes<T>, std::min(kRegisters - 4, 16));

// Whether a problem is computed in this way. Where bits are fixed, int8 keys are not: their scores
// are rounded as those of tiles are, whose keys are multiplied by their scales.
template <class E>
bool has_few_rows(const Problem& p) {
  return !(kFixedBits && p.is_int8()) && few_rows_of(p, kLanes<Compute<E>>, kTiles && kInPairs<E>);
}
// Whether passes after the forward pass make the scores in this way. Where bits are fixed, they are
// those of tiles, which other passes make anyway.
template <class E>
bool has_few_scores(const Problem& p) {
  return !kFixedBits && has_few_rows<E>(p);
}

// Calls f(row, rows) for `rows` rows in portions of 8, 4, 2 and 1, no larger than MAX: the size of
// each portion is known when compiling.
template <int MAX, class F>
QKV_INLINE void for_each_portion(int64_t rows, const F& f) {
  if constexpr (MAX >= 8)
    in_steps<8, 4, 2, 1>(rows, f);
  else
    in_steps<4, 2, 1>(rows, f);
}
// With more rows at once there would be no registers for two keys, or two vectors of values.
template <class T>
constexpr int kFewPortion = std::min(kFewSums<T>, kRegisters / 4);

}  // namespace qkv::QKV_ISA
