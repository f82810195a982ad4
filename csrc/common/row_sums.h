// Rows whose log-sum-exp says too little, so that the backward pass adds up their weights anew.
//
// A weight is exp(score - lse), and lse is rounded: the weights of a row add up to 1 + d. And
// <dO_i, O_i>, which stands for sum_j weight_ij * dP_ij, is rounded in another way than the sum.
// Both errors are common to all weights of the row. They are more than those of a gradient's own
// sums where
//   - lse is large. Below 128, half a unit of its last place is at most 2^-18 in f32, and so is d;
//     it grows with lse. Where a mask is finfo.min for all S keys of a row, lse = finfo.min +
//     log(S) has lost log(S), and the weights add up to S;
//   - weights have a gradient themselves, of which O knows nothing;
//   - O is rounded, in half precision, and ALiBi's slopes have a gradient: they add up dS_ij times
//     a distance of up to S. The dS_ij of a row add up to 0, but an error that all of them share is
//     multiplied by the sum of the distances;
//   - there are few keys, so that sums over them are nearly exact (kernels/score/whole_rows.h).
// Whoever has cut the keys into parts gives a part the log-sum-exp of them all. Its weights add up
// to less than 1, and the sum says nothing: see are_whole().
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "attention.h"
#include "common/half.h"

namespace qkv {

// Scores of trained models rarely come to this, and the passes of a row beyond it take longer.
constexpr double kLargeLse = 128;

// Torch multiplies up to 11 keys in shorter sums than more of them, and keeps the weights of the
// forward pass. Our errors were 1.2 to 2.2 times torch's (tests/python/test_row_sums.py).
constexpr int64_t kFewKeys = 11;
// With few keys, dK and dV are made of sums over so many rows. With as many as a block has, their
// errors were up to 1.26 times torch's.
constexpr int64_t kShortChain = 16;

// Weights that add up to `sum` are all weights of their row if that is no more than rounding makes
// of 1. Half a unit in the last place of lse is at most |lse| * epsilon / 2, and is taken twice;
// kSumRounding * epsilon is left for the sum.
constexpr int kSumRounding = 16;
template <class T>
bool are_whole(double sum, T lse) {
  const double most = double(std::numeric_limits<T>::epsilon()) * (kSumRounding + std::abs(lse));
  return 1 - sum <= most && sum - 1 <= most * sum;
}

// Whether the backward pass makes short sums. In half precision O itself is rounded, for torch as
// for us, and that is all the error there is.
template <class E>
bool has_few_keys(const Problem& p) {
  return std::is_same_v<E, Compute<E>> && p.seqlen_k <= kFewKeys;
}

// Whether the weights of a row with that lse are added up in a pass of their own.
template <class T>
bool sums_row(const Problem& p, const BackwardArgs& a, T lse) {
  const bool is_large = std::abs(lse) >= T(kLargeLse);
  const bool is_rounded = p.dtype != compute_type(p.dtype) && a.grad_by_head[kAlibiSlopes].data;
  // The package makes second derivatives of half precision in f32 (run_wide), so that O is precise.
  const bool is_off = is_large || (is_rounded && !a.direction);
  return a.grad_weights.data || (is_off && std::abs(lse) < std::numeric_limits<T>::infinity());
}

// Gives BackwardArgs::row_sums [B..., H, L, 2] strides, and returns how many elements that takes.
// With spans, documents of a packed batch have rows one after the other, in one batch item.
inline int64_t lay_out_row_sums(const Problem& p, Strides& strides) {
  int64_t rows = p.spans ? 0 : p.seqlen_q;
  bool are_packed = p.spans;
  for (int64_t b = 0; p.spans && b < p.batch(); ++b) {
    are_packed &= p.spans[b].query_begin >= rows;
    rows = std::max(rows, p.spans[b].query_begin + p.spans[b].seqlen_q);
  }
  strides = {};
  strides.col = 1, strides.row = 2, strides.head = 2 * rows;
  int64_t item = p.heads * strides.head;
  for (int d = p.batch_rank - 1; d >= 0 && !are_packed; --d) {
    strides.batch[d] = item;
    item *= p.batch_sizes[d];
  }
  return item;
}

}  // namespace qkv
