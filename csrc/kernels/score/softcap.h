// The soft cap on scores: softcap(x) = c * tanh(x / c), c = Problem::softcap.
#pragma once

#include "kernels/operands/tile.h"
#include "kernels/simd/exp.h"

namespace qkv::QKV_ISA {

// Caps the scores of ROWS keys, which are `step` elements apart, for one vector of lanes. cap = c,
// inverse = 1 / c.
template <class T, int ROWS>
QKV_INLINE void softcap_rows(T cap, T inverse, int64_t step, T* scores, T* slope) {
  Vec<T> t[ROWS];
  QKV_UNROLL
  for (int i = 0; i < ROWS; ++i) t[i] = load(scores + i * step) * inverse;
  tanh<T>(t);
  QKV_UNROLL
  for (int i = 0; i < ROWS; ++i) {
    store(scores + i * step, t[i] * cap);
    if (slope) store(slope + i * step, 1 - t[i] * t[i]);
  }
}

// Caps scores [keys x lanes] in place. slope [keys x lanes], if not null, gets the derivative of
// softcap.
template <class T>
void softcap(const Problem& p, const Tile& tile, int64_t keys, T* scores, T* slope) {
  const T cap = T(p.softcap), inverse = T(1 / p.softcap);
  for (int v = 0; v < tile.lanes; v += kLanes<T>) {
    const auto run = [&](auto rows, int64_t j) {
      const int64_t at = j * tile.step + v;
      softcap_rows<T, rows>(cap, inverse, tile.step, scores + at, slope ? slope + at : nullptr);
    };
    int64_t j = 0;
    for (; j + kVectorsInStep <= keys; j += kVectorsInStep)
      run(std::integral_constant<int, kVectorsInStep>(), j);
    for (; j < keys; ++j) run(std::integral_constant<int, 1>(), j);
  }
}

// grad_scores [keys x lanes] *= slope [keys x lanes].
template <class T>
void softcap_backward(const Tile& tile, int64_t keys, const T* slope, T* grad_scores) {
  for (int64_t j = 0; j < keys; ++j)
    for (int v = 0; v < tile.lanes; v += kLanes<T>) {
      const int64_t at = j * tile.step + v;
      store(grad_scores + at, load(grad_scores + at) * load(slope + at));
    }
}

}  // namespace qkv::QKV_ISA
