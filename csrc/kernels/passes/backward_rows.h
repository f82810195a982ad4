// A block of rows of the backward pass: what is packed of it, and how the sum of its dQ comes into
// its tiles and leaves them.
#pragma once

#include "kernels/passes/finish_grad.h"
#include "kernels/passes/grad_rows.h"
#include "kernels/simd/transpose.h"

namespace qkv::QKV_ISA {

// A block of up to kGradRows rows, packed, and the tiles it consists of.
template <class S>
struct BackwardRows {
  using T = typename S::T;
  int64_t row, rows;
  static constexpr int kMaxTiles = kGradRows / kTileRows<T>;
  typename S::RowTile tiles[kMaxTiles];
  int count = 0;

  BackwardRows(const Problem& p, const BackwardArgs& a, Plane plane, int64_t row_begin,
               int64_t row_count, S& s)
      : row(row_begin), rows(row_count) {
    load_statistics(p, a, plane, row, rows, s);
    s.load_rows(p, a, plane, row, rows);
    if constexpr (S::kTwice) s.load_rows_jvp(p, plane, row, rows);
    for (int64_t lane = 0; lane < rows; lane += kTileRows<T>, ++count) {
      s.pack(p, make_tile<T>(p, plane, row + lane, row + rows, kGradRows), lane, tiles[count]);
      if constexpr (S::kTwice) s.pack_jvp(p, tiles[count]);
    }
  }

  const Tile& first() const { return tiles[0].tile; }
  const Tile& last() const { return tiles[count - 1].tile; }

  // One tile that sees what some of them see together, for what asks for nothing else.
  Tile around(const Range& some) const {
    Tile tile = tiles[some.begin].tile;
    tile.last = tiles[some.end - 1].tile.last;
    const Range keys = keys_of_tiles(tiles + some.begin, some.end - some.begin);
    tile.key_begin = keys.begin, tile.key_end = keys.end;
    return tile;
  }
};

// Brings the sums of grad_query of a block of rows into its tiles, or back.
template <class S, class T = typename S::T>
void load_grad_query(const Problem& p, const Rows<T>& sums, bool has_sums,
                     const BackwardRows<S>& rows, S& s) {
  const int64_t dim = padded<T>(p.head_dim);
  for (int t = 0; t < rows.count; ++t) {
    const auto& of = rows.tiles[t];
    if (!has_sums) {
      std::fill_n(of.grad_query, of.tile.lanes * dim, T(0));
      continue;
    }
    T* const to = of.in_rows ? of.grad_query : s.grad_query;
    for (int r = 0; r < of.tile.rows; ++r) std::copy_n(sums[of.tile.row + r], dim, to + r * dim);
    if (of.in_rows) continue;
    std::fill(s.grad_query + of.tile.rows * dim, s.grad_query + of.tile.lanes * dim, T(0));
    transpose<T>(s.grad_query, dim, of.grad_query, of.tile.lanes, of.tile.lanes, dim);
  }
}
// Where no other sums are to come, it is not they that are brought back, but the gradient.
template <class S, class T = typename S::T>
void store_grad_query(const Problem& p, const BackwardArgs& a, const BackwardItem& item,
                      const Rows<T>& sums, const BackwardRows<S>& rows, S& s) {
  using E = typename S::Element;
  const Rows<E> gradient = rows_of<E>(p, a.grad_query, item.plane);
  const int64_t dim = padded<T>(p.head_dim);
  for (int t = 0; t < rows.count; ++t) {
    const auto& of = rows.tiles[t];
    const T* const from = of.in_rows ? of.grad_query : s.grad_query;
    if (!of.in_rows)
      transpose<T>(of.grad_query, of.tile.lanes, s.grad_query, dim, dim, of.tile.lanes);
    if (item.completes_rows)
      finish_dense<E>(from, of.tile.rows, gradient, of.tile.row, T(p.scale), p.head_dim);
    else
      for (int r = 0; r < of.tile.rows; ++r)
        std::copy_n(from + r * dim, dim, sums[of.tile.row + r]);
  }
}

}  // namespace qkv::QKV_ISA
