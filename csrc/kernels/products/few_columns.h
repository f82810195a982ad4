// Scores of few rows where bits are fixed: by the products of tiles, with the rows as A and the
// transposed keys as B, so that they are the bits that a row has in a tile.
#pragma once

#include "kernels/gemm/gemm.h"
#include "kernels/products/few_rows.h"

namespace qkv::QKV_ISA {

// to [rows, D] = rows [row, row + rows) of the queries of a plane, times scale.
template <class E, class T = Compute<E>>
void pack_few_rows(const Problem& p, Plane plane, int64_t row, int64_t rows, T* to) {
  gather_rows(rows_of<E>(p, p.query, plane), row, rows, rows, p.head_dim, to);
  for (int64_t i = 0; i < rows * p.head_dim; ++i) to[i] *= T(p.scale);
}

// scores [rows x keys] = the scores of the queries of pack_few_rows; dim is a multiple of W. The
// keys are transposed 2 W at a time, into columns [dim, 2 W], which stay in a first-level cache.
template <class E, class T = Compute<E>>
void few_scores_by_columns(int64_t rows, int64_t dim, FewPlaces<E> keys, const T* query, T* columns,
                           T* scores) {
  constexpr int W = kLanes<T>;
  constexpr int64_t kColumns = 2 * W;
  FewAhead<E> ahead(keys, dim);
  ahead.steps = (keys.count + kColumns - 1) / kColumns * 2 * (dim / W);
  for (int64_t j = 0; j < keys.count; j += kColumns) {
    for (int64_t lane = 0; lane < kColumns; lane += W) {
      const E* from[W];
      for (int r = 0; r < W; ++r) from[r] = keys.rows[std::min(j + lane + r, keys.count - 1)];
      for (int64_t d = 0; d < dim; d += W) {
        ahead.step();
        transpose_square<T>([&](int r) { return load_wide(from[r] + d); },
                            columns + d * kColumns + lane, kColumns);
      }
    }
    gemm<T>(rows, kColumns,
            {dim, query, dim, 1, columns, kColumns, scores + j, kFewStep, Beta::zero, nullptr});
  }
}

}  // namespace qkv::QKV_ISA
