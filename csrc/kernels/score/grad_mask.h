// The gradients of masks: dS itself, or its sums over rows or keys where the mask broadcasts.
#pragma once

#include "kernels/operands/operands.h"

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

// sums [keys, G, lanes of a vector] += the sum of grad_scores over the rows of each head, for each
// key; all lanes of a vector get the same sum. Each head is a product with a vector of ones, so
// that a NaN of one head does not reach another.
template <class T>
void add_key_sums(const Problem& p, const Tile& tile, int64_t keys, const T* grad_scores, T* sums) {
  constexpr int W = kLanes<T>;
  const int64_t group = p.group();
  T ones[W];
  store(ones, splat(T(1)));
  for (int64_t head = 0; head < group; ++head) {
    const int64_t lane = (head + group - tile.row % group) % group;
    const int64_t depth = (tile.rows - lane + group - 1) / group;
    // Where bits are fixed, rows are added one by one: a chain of them would end with its tile.
    const int64_t chain = kFixedBits ? 1 : depth;
    for (int64_t row = 0; row < depth; row += chain)
      gemm<T>(keys, W,
              {chain, grad_scores + lane + row * group, tile.step, group, ones, 0, sums + head * W,
               group * W, Beta::one, nullptr});
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
                 static_cast<T*>(item.sums.mask_keys[m]) + key * p.group() * kLanes<T>);
  if (row_sums) add_row_sums(tile, keys, grad_scores, row_sums + tile.row);
}

}  // namespace qkv::QKV_ISA
