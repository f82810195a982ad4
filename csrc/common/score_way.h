// Which planes have few rows, whose scores and sums of values are made row by row
// (kernels/products/few_rows.h).
#pragma once

#include <algorithm>

#include "attention.h"

namespace qkv {

constexpr int64_t kFewRows = 8;

// `lanes` is how many elements of the compute type a vector has. It and the shape of a plane alone
// decide, since the forward and the backward pass must round alike.
inline bool few_rows_of(const Problem& p, int64_t lanes) {
  if (p.score_way == ScoreWay::tiles) return false;
  const bool scores = p.group() * p.seqlen_q <= std::min(kFewRows, 2 * lanes) &&
                      p.key.strides.col == 1 && p.head_dim % lanes == 0;
  const bool values = p.value.strides.col == 1 && p.head_dim_v % lanes == 0;
  return scores && (values || p.score_way == ScoreWay::few_rows);
}

}  // namespace qkv
