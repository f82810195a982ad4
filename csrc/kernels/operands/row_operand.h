// A block of rows of query or grad_output as operand B, in both directions.
#pragma once

#include "kernels/operands/operand.h"
#include "kernels/operands/rows.h"
#include "kernels/operands/tile.h"
#include "kernels/simd/transpose.h"

namespace qkv::QKV_ISA {

// How many Factors a row of the transposed matrix has for each lane.
template <class E>
constexpr int64_t packed_size(int64_t dim) {
  return padded<Natural<E>>(dim) * int64_t(sizeof(Natural<E>)) / int64_t(sizeof(Factor<E>));
}

// Reads rows into scratch memory [rows, padded<Natural<E>>(dim)], or refers to them where they lie.
template <class E>
class RowOperand {
  using T = Compute<E>;

 public:
  RowOperand(Arena& arena, int64_t max_rows, int64_t dim)
      : dim_(dim), rows_(arena.take<T>(max_rows * padded<T>(dim))), matrix_{rows_, step(), 1} {}

  // Reads rows [begin, begin + valid) times `factor`, and adds rows of zeros up to `count`, a
  // multiple of the lanes of a vector. may_refer: rows that would be copied as they are need not
  // be; nobody calls natural() then.
  void read(const Rows<const E>& rows, int64_t begin, int64_t valid, int64_t count, T factor = 1,
            bool may_refer = false) {
    matrix_ = {rows_, step(), 1};
    if constexpr (std::is_same_v<E, T>) {
      const bool lie_whole = rows.group == 1 && rows.col == 1 && dim_ == step() && valid == count;
      if (may_refer && lie_whole && factor == 1) {
        matrix_ = {rows[begin], rows.row, 1};
        return;
      }
    }
    gather_rows(rows, begin, valid, count, dim_, rows_);
    if (factor == 1) return;
    for (int64_t i = 0; i < valid * step(); ++i) rows_[i] *= factor;
  }

  // Returns the transposed matrix [dim x lanes] of rows [lane, lane + lanes) times `factor`, which
  // it writes to `to` [packed_size(dim) * lanes].
  QKV_INLINE RightOperand<T> pack(int64_t lane, int64_t lanes, T factor, T* to) const {
    transpose<T>(matrix_.from(lane).data, matrix_.row, to, lanes, lanes, step(), factor);
    return {to, lanes};
  }

  // Must be called for the first `count` rows before rows(): pairs are made of two rows.
  void zip(int64_t) const {}
  // The rows from `lane` on, a multiple of kDepthMultiple<E>: [rows x padded<T>(dim)].
  RightOperand<T> rows(int64_t lane) const { return {matrix_.from(lane).data, matrix_.row}; }

  // The rows as they were read, step() apart. Whoever writes to them calls zip() again.
  T* natural() const { return rows_; }
  int64_t step() const { return padded<T>(dim_); }

  // What read() and pack() do, for the rows of one vector of lanes and without a copy of them: to
  // [packed_size(dim) x lanes], of which one vector is written, = the transposed matrix of rows
  // from[0], from[1], ... times `factor`. Their elements are `col` apart.
  static RightOperand<T> pack(const E* const (&from)[kLanes<T>], int64_t col, int64_t dim,
                              int64_t lanes, T factor, T* to) {
    constexpr int W = kLanes<T>;
    int64_t d = 0;
    for (; col == 1 && d + W <= dim; d += W)
      transpose_square<T>([&](int r) { return factor * load_wide(from[r] + d); }, to + d * lanes,
                          lanes);
    for (T rows[W][W]; d < dim; d += W) {
      for (int r = 0; r < W; ++r)
        gather_row(from[r] + d * col, col, std::min<int64_t>(W, dim - d), rows[r]);
      transpose_square<T>([&](int r) { return factor * load(rows[r]); }, to + d * lanes, lanes);
    }
    return {to, lanes};
  }

 private:
  int64_t dim_;
  T* rows_;
  Matrix<T> matrix_;
};

// Packs the queries of a tile, times scale, into `to` [packed_size(D) x lanes]. Lanes without a row
// repeat the last row.
template <class E>
RightOperand<Factor<E>> pack_queries(const Problem& p, const Tile& tile, Factor<E>* to) {
  constexpr int W = kLanes<Factor<E>>;
  const Rows<const E> rows = rows_of<E>(p, p.query, tile.plane);
  RightOperand<Factor<E>> packed{};
  for (int lane = tile.lanes - W; lane >= 0; lane -= W) {
    const E* from[W];
    row_addresses(rows, tile.row + lane, tile.rows - lane, from);
    packed =
        RowOperand<E>::pack(from, rows.col, p.head_dim, tile.lanes, Compute<E>(p.scale), to + lane);
  }
  return packed;
}

}  // namespace qkv::QKV_ISA
