// The gradients of masks: dS itself, or its sums over rows or keys where the mask broadcasts.
#pragma once

#include "kernels/operands/operands.h"
#include "kernels/simd/transpose.h"

namespace qkv::QKV_ISA {

// sums [tile.rows] += the sum of grad_scores [keys x lanes] over the keys, for each row of the
// tile.
template <class T>
void add_row_sums(const Tile& tile, int64_t keys, const T* grad_scores, double* sums) {
  for (int v = 0; v < tile.lanes; v += kLanes<T>) {
    Vec<T> sum{};
    for (int64_t j = 0; j < keys; ++j) sum += load(grad_scores + j * tile.step + v);
    for (int l = v; l < std::min(v + kLanes<T>, tile.rows); ++l) sums[l] += double(sum[l - v]);
  }
}

// sums [keys, G] += the sum of grad_scores over the rows of each head, for each key.
template <class T>
void add_key_sums(const Problem& p, const Tile& tile, int64_t keys, const T* grad_scores, T* sums) {
  constexpr int W = kLanes<T>;
  const int64_t group = p.group(), heads = std::min<int64_t>(group, tile.rows);
  for (int64_t key = 0; key < keys; key += W) {
    Vec<T> rows[kTileRows<T>];  // keys are in their lanes
    for (int v = 0; v < tile.lanes; v += W)
      transpose_square<T>(
          [&](int i) QKV_INLINE_LAMBDA {
            return load(grad_scores + std::min(key + i, keys - 1) * tile.step + v);
          },
          [&](int r, Vec<T> x) QKV_INLINE_LAMBDA { rows[v + r] = x; });
    const int64_t count = std::min<int64_t>(W, keys - key);
    for (int64_t first = 0; first < heads; ++first) {
      T* const to = sums + key * group + (tile.row + first) % group;
      // Where bits are fixed, rows are added one by one: a chain of them would end with its tile.
      Vec<T> sum{};
      for (int64_t i = 0; kFixedBits && i < count; ++i) sum[i] = to[i * group];
      for (int64_t r = first; r < tile.rows; r += group) sum += rows[r];
      for (int64_t i = 0; i < count; ++i)
        to[i * group] = kFixedBits ? sum[i] : sum[i] + to[i * group];
    }
  }
}

// Adds dS of a tile to the gradient of mask m, or to its sums over rows or keys.
template <class T>
void add_grad_mask(const Problem& p, const BackwardArgs& a, const BackwardItem& item, int m,
                   const Tile& tile, int64_t key, int64_t keys, const T* grad_scores) {
  const GradMask& grad = a.grad_masks[m];
  double* const row_sums = item.sums.mask_rows[m];
  if (grad.each.data)
    add_tile<T>(score_rows_of<T>(p, grad.each, tile.plane), tile, key, keys, grad_scores, nullptr);
  if (grad.keys.data)
    add_key_sums(p, tile, keys, grad_scores,
                 static_cast<T*>(item.sums.mask_keys[m]) + key * p.group());
  if (row_sums) add_row_sums(tile, keys, grad_scores, row_sums + tile.row);
}

}  // namespace qkv::QKV_ISA
