// Keys, values and rows in bf16 as the operands of products of pairs: KeyOperand and RowOperand
// (key_operand.h, row_operand.h), whose functions are described there.
#pragma once

#include "kernels/gemm/pairs.h"
#include "kernels/operands/key_operand.h"
#include "kernels/operands/key_rows.h"
#include "kernels/operands/operand.h"
#include "kernels/operands/row_operand.h"
#include "kernels/operands/rows.h"
#include "kernels/simd/transpose.h"

namespace qkv::QKV_ISA {

// How many pairs of a row of `dim` bf16 a product along the row multiplies. AMX tiles take 16 pairs
// at a time, and would have to copy both operands where fewer are left over; so they are given rows
// that are padded with zeros.
constexpr int64_t depth_pairs(int64_t dim) {
  return kTiles ? padded_halves(dim) / 2 : pairs_in(dim);
}

// How many rows of V^T, or of K^T, are multiplied: dim, and with AMX rows of zeros up to whole
// tiles.
constexpr int64_t product_rows(int64_t dim) { return kTiles ? padded<float>(dim) : dim; }

// Rows [key, key + keys) as depth_pairs(dim) pairs of neighbouring columns. They are read where
// they lie if their layout permits, else copied to scratch [keys, padded_halves(dim)].
inline Matrix<Pair> read_pairs(const KeyRows<BFloat16>& rows, int64_t dim, int64_t key,
                               int64_t keys, BFloat16* scratch) {
  const auto as_pairs = [](const BFloat16* data, int64_t row) -> Matrix<Pair> {
    return {reinterpret_cast<const Pair*>(data), row / 2, 1};
  };
  const bool ends_with_a_pair = dim == 2 * depth_pairs(dim);
  if (rows.col() == 1 && rows.row() % 2 == 0 && ends_with_a_pair &&
      rows.piece_end(key) >= key + keys)
    return as_pairs(rows.at(key), rows.row());
  const int64_t step = padded_halves(dim);
  for (int64_t j = 0; j < keys; ++j) {
    rows.fetch_ahead(key + j);
    copy_row(rows.at(key + j), rows.col(), dim, scratch + j * step);
  }
  return as_pairs(scratch, step);
}

// Has a copy for each direction: rows as they lie, if they cannot be read there, and pairs of
// consecutive keys for the transposed matrix.
template <>
class KeyOperand<BFloat16> {
 public:
  KeyOperand(Arena& arena, bool, int64_t max_keys, int64_t dim, Use use) : dim_(dim), use_(use) {
    const int64_t step = padded_halves(dim);
    if (use != Use::columns) copy_ = arena.take<BFloat16>(max_keys * step);
    if (use == Use::rows) return;
    zipped_ = arena.take<Pair>(padded<Pair>(pairs_in(max_keys)) * step);
    if (kTiles) scratch_ = arena.take<Pair>(kLanes<Pair> * step);
  }

  void load(const KeyRows<BFloat16>& rows, int64_t key, int64_t keys) {
    first_ = key, count_ = keys;
    if (use_ != Use::columns) rows_ = read_pairs(rows, dim_, key, keys, copy_);
    if (use_ != Use::rows) zip(rows);
  }

  void load(const KeyOperand& wider, int64_t key, int64_t keys) {
    const Matrix<BFloat16> rows = wider.natural();
    load(KeyRows<BFloat16>(rows.data, key, rows.row, dim_), key, keys);
  }

  LeftOperand<Pair> rows(int64_t key, int64_t keys) const {
    return {rows_.from(key - first_), keys, depth_pairs(dim_)};
  }
  // The depth is as many pairs as there are; AMX tiles multiply whole steps where nothing but zeros
  // follows the last key.
  LeftOperand<Pair> columns(int64_t key, int64_t keys) const {
    const int64_t pairs = pairs_in(keys), whole = padded<Pair>(pairs), skipped = (key - first_) / 2;
    const bool zeros = kTiles && key + keys == first_ + count_ && skipped + whole <= columns_.row;
    return {{columns_.data + skipped * columns_.col, columns_.row, columns_.col},
            product_rows(dim_),
            zeros ? whole : pairs};
  }
  Matrix<BFloat16> natural() const {
    return {reinterpret_cast<const BFloat16*>(rows_.data), 2 * rows_.row, 1};
  }

 private:
  void zip(const KeyRows<BFloat16>& rows) {
    // The members are copied for the reason that RowOperand::read gives.
    const int64_t dim = dim_, first = first_, end = first_ + count_;
    const int64_t step = padded_halves(dim), pairs = pairs_in(count_);
    const auto zip_pair = [=, &rows](int64_t pair, Pair* to) {
      const int64_t j = first + 2 * pair;
      rows.fetch_ahead(j);
      rows.fetch_ahead(j + 1);
      zip_rows(rows.at(j), j + 1 < end ? rows.at(j + 1) : nullptr, rows.col(), dim, to);
    };
    if (!kTiles) {
      Pair* const to = zipped_;
      for (int64_t i = 0; i < pairs; ++i) zip_pair(i, to + i * step);
      columns_ = {zipped_, 1, step};
      return;
    }
    // Tiles want neighbours along the depth to be neighbours in memory.
    for (int64_t i = 0; i < pairs; i += kLanes<Pair>) {
      const int64_t count = std::min<int64_t>(kLanes<Pair>, pairs - i);
      for (int64_t r = 0; r < count; ++r) zip_pair(i + r, scratch_ + r * step);
      std::fill(scratch_ + count * step, scratch_ + kLanes<Pair> * step, Pair{});
      transpose(scratch_, step, zipped_ + i, padded<Pair>(pairs), kLanes<Pair>, step);
    }
    columns_ = {zipped_, padded<Pair>(pairs), 1};
  }

  int64_t dim_;
  Use use_;
  BFloat16* copy_ = nullptr;
  Pair *zipped_ = nullptr, *scratch_ = nullptr;
  int64_t first_ = 0, count_ = 0;
  Matrix<Pair> rows_{}, columns_{};
};

template <>
class RowOperand<BFloat16> {
 public:
  RowOperand(Arena& arena, int64_t max_rows, int64_t dim)
      : dim_(dim),
        rows_(arena.take<BFloat16>(max_rows * step())),
        zipped_(arena.take<Pair>(pairs_in(max_rows) * step())) {}

  void read(const Rows<const BFloat16>& rows, int64_t begin, int64_t valid, int64_t count,
            float factor = 1, bool = false) {
    factor_ = factor;
    // The members are copied because the compiler cannot tell that the stores leave them alone, and
    // would load them again after each.
    const int64_t dim = dim_, step = this->step();
    BFloat16* const to = rows_;
    const Rows<const BFloat16> from = rows;
    for (int64_t r = 0; r < valid; ++r) copy_row(from[begin + r], from.col, dim, to + r * step);
    std::fill(to + valid * step, to + count * step, BFloat16{});
  }

  RightOperand<Pair> pack(int64_t lane, int64_t lanes, float factor, Pair* to) const {
    transpose(reinterpret_cast<const Pair*>(rows_ + lane * step()), step() / 2, to, lanes, lanes,
              step() / 2);
    return {to, lanes, factor_ * factor};
  }

  // Makes pairs of consecutive rows.
  void zip(int64_t count) const {
    const int64_t step = this->step();
    const BFloat16* const from = rows_;
    Pair* const to = zipped_;
    for (int64_t r = 0; r < count; r += 2)
      zip_rows(from + r * step, from + (r + 1) * step, 1, step, to + r / 2 * step);
  }
  RightOperand<Pair> rows(int64_t lane) const {
    return {zipped_ + lane / 2 * step(), step(), factor_};
  }

  BFloat16* natural() const { return rows_; }
  int64_t step() const { return padded_halves(dim_); }

  static RightOperand<Pair> pack(const BFloat16* const (&from)[kLanes<Pair>], int64_t col,
                                 int64_t dim, int64_t lanes, float factor, Pair* to) {
    constexpr int W = kLanes<Pair>;
    int64_t d = 0;
    for (; col == 1 && d + kPairHalves <= dim; d += kPairHalves)
      transpose_square<Pair>(
          [&](int r) { return load(reinterpret_cast<const Pair*>(from[r] + d)); },
          to + d / 2 * lanes, lanes);
    for (BFloat16 rows[W][kPairHalves]; d < dim; d += kPairHalves) {
      for (int r = 0; r < W; ++r)
        copy_row(from[r] + d * col, col, std::min<int64_t>(kPairHalves, dim - d), rows[r]);
      transpose_square<Pair>([&](int r) { return load(reinterpret_cast<const Pair*>(rows[r])); },
                             to + d / 2 * lanes, lanes);
    }
    return {to, lanes, factor};
  }

 private:
  int64_t dim_;
  BFloat16* rows_;
  Pair* zipped_;  // [pairs of rows x padded_halves(dim)]
  float factor_ = 1;
};

}  // namespace qkv::QKV_ISA
