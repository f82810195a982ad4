// A tile of our own making, weights or gradients of scores, as operand of a product. Elements are
// multiplied where they are; pairs are rounded copies of them.
//
// `each` calls product(operand), for pairs a second time if with_rest: then with what rounding took
// off the tile.
#pragma once

#include "kernels/operands/operand.h"
#include "kernels/operands/tile.h"

namespace qkv::QKV_ISA {

// B [keys x lanes], of a tile whose keys are tile.step apart. `depth`: how many Factors long A is.
template <class E>
struct TileAsB {
  using T = Compute<E>;

  explicit TileAsB(Arena&) {}

  template <class F>
  void each(const Tile& tile, const T* from, int64_t, int64_t, bool, const F& product) const {
    product(RightOperand<T>{from, tile.step});
  }
};

// A [keys x rows], of tiles side by side whose keys are kGradRows apart.
template <class E>
struct TileAsA {
  using T = Compute<E>;

  explicit TileAsA(Arena&) {}

  template <class F>
  void each(const T* from, int64_t keys, int64_t rows, bool, const F& product) const {
    product(LeftOperand<T>{{from, kGradRows, 1}, keys, rows});
  }
};

}  // namespace qkv::QKV_ISA
