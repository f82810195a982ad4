// The derivative of the softmax: turns scores and dP into weights and dS, in place.
#pragma once

#include "kernels/passes/grad_rows.h"
#include "kernels/score/softmax.h"
#include "kernels/simd/exp.h"

namespace qkv::QKV_ISA {

// What grad_softmax does, for one vector of lanes and ROWS keys, which are `step` elements apart.
template <class T, bool hides, int ROWS>
QKV_INLINE void grad_softmax_rows(const GradLanes<T>& lanes, int64_t step, T* weights,
                                  T* grad_scores) {
  Vec<T> score[ROWS], weight[ROWS];
  QKV_UNROLL
  for (int i = 0; i < ROWS; ++i) weight[i] = score[i] = load(weights + i * step);
  exp<T>(weight, lanes.by);
  QKV_UNROLL
  for (int i = 0; i < ROWS; ++i) {
    weight[i] *= lanes.factor;
    Vec<T> grad = weight[i] * (load(grad_scores + i * step) - lanes.delta);
    // dP of a hidden pair may be anything, NaN included.
    if (hides) grad = score[i] == -kInfinity<T> ? Vec<T>{} : grad;
    store(weights + i * step, weight[i]);
    store(grad_scores + i * step, grad);
  }
}

// weights [keys x lanes]: scores before, weights after. grad_scores [keys x lanes]: dP before, dS
// after. `lane` is the tile's first row in the block of rows. With hides, a score of -inf gets a
// gradient of 0, which is right for all rows whose factor and delta are finite.
template <bool hides, class E, class T = Compute<E>>
void grad_softmax(const Tile& tile, int64_t lane, int64_t keys, T* weights, T* grad_scores,
                  const BackwardScratch<E>& s) {
  for (int64_t v = 0; v < tile.lanes; v += kLanes<T>) {
    const GradLanes<T> lanes = s.lanes(lane + v);
    subtract_base<T>(load(s.base + lane + v), keys, tile.step, weights + v);
    in_steps<kVectorsInStep, 1>(keys, [&](int64_t j, auto rows) {
      // The count begins in the middle, because a product came before the loop and one follows.
      ProductUnit::keep_awake(j + 32);
      grad_softmax_rows<T, hides, rows>(lanes, tile.step, weights + v + j * tile.step,
                                        grad_scores + v + j * tile.step);
    });
  }
}

}  // namespace qkv::QKV_ISA
