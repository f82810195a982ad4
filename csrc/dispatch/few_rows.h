// Which planes go row by row instead of in tiles.
#pragma once

#include <algorithm>

#include "problem.h"

namespace qkv {

// Planes of no more rows have their scores and sums of values made row by row, if their layout lets
// them (kernels/products/few_rows.h). `lanes` is how many elements of the compute type a vector
// has. It and the shape of a plane alone decide, since the forward and the backward pass must round
// alike. For a tile int8 keys would be widened, so that it pays later: on a Zen 4, 16 rows of int8
// take 0.9 of a tile's time with queries in f32, and 0.5, as 32 do, in half precision.
constexpr int64_t kFewRows = 32;
inline bool few_rows_of(const Problem& p, int64_t lanes) {
  if (p.score_way == ScoreWay::tiles) return false;
  const int64_t most = !p.is_int8() ? 8 : p.dtype == DType::f32 ? 16 : kFewRows;
  const bool scores = p.group() * p.seqlen_q <= std::min(most, 2 * lanes) &&
                      p.key.strides.col == 1 && p.head_dim % lanes == 0;
  const bool values = p.value.strides.col == 1 && p.head_dim_v % lanes == 0;
  return scores && (values || p.score_way == ScoreWay::few_rows);
}

}  // namespace qkv
