// Which planes go row by row instead of in tiles.
#pragma once

#include <algorithm>

#include "problem.h"

namespace qkv {

// Planes of no more rows may have their scores and sums of values made row by row, if their layout
// lets them (kernels/products/few_rows.h). `lanes` is how many elements of the compute type a
// vector has, and `in_tiles` whether pairs of bf16 are multiplied by AMX. They and the shape of a
// plane alone decide, since the forward and the backward pass must round alike.
//
// Tiles are faster from 9 rows on where there are few keys, or AMX; of 2048 keys and D = 64 on a
// Zen 4, 16 rows of f32 take 0.65 of a tile's time. For a tile int8 keys are widened: 16 rows of
// them take 0.9 of its time with queries of f32, and in half precision 16 and 32 take 0.5.
constexpr int64_t kFewRows = 32;
inline int64_t most_few_rows(const Problem& p, bool in_tiles) {
  if (p.is_int8()) return p.dtype == DType::f32 ? 16 : kFewRows;
  return in_tiles || p.seqlen_k < 128 ? 8 : 16;
}
inline bool few_rows_of(const Problem& p, int64_t lanes, bool in_tiles) {
  if (p.score_way == ScoreWay::tiles) return false;
  const int64_t most = std::min(most_few_rows(p, in_tiles), 2 * lanes);
  const bool scores = p.plane_rows() <= most && p.key.strides.col == 1 && p.head_dim % lanes == 0;
  const bool values = p.value.strides.col == 1 && p.head_dim_v % lanes == 0;
  return scores && (values || p.score_way == ScoreWay::few_rows);
}

}  // namespace qkv
