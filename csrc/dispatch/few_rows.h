// Which planes go row by row instead of in tiles.
#pragma once

#include <algorithm>

#include "problem.h"

namespace qkv {

// Planes of no more rows have their scores and sums of values made row by row, if their layout lets
// them (kernels/products/few_rows.h). `lanes` is how many elements of the compute type a vector
// has. It and the shape of a plane alone decide, since the forward and the backward pass must round
// alike.
constexpr int64_t kFewRows = 8;
inline bool few_rows_of(const Problem& p, int64_t lanes) {
  if (p.score_way == ScoreWay::tiles) return false;
  const bool scores = p.group() * p.seqlen_q <= std::min(kFewRows, 2 * lanes) &&
                      p.key.strides.col == 1 && p.head_dim % lanes == 0;
  const bool values = p.value.strides.col == 1 && p.head_dim_v % lanes == 0;
  return scores && (values || p.score_way == ScoreWay::few_rows);
}

}  // namespace qkv
