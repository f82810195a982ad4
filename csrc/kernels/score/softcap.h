// The soft cap on scores: softcap(x) = c * tanh(x / c), c = Problem::softcap. With t = tanh(x / c),
// its derivative is 1 - t^2, and its second one is -2 t (1 - t^2) / c.
#pragma once

#include "kernels/score/option.h"
#include "kernels/simd/tanh.h"

namespace qkv::QKV_ISA {

// Caps the scores of ROWS keys, which are `step` elements apart, for one vector of lanes. cap = c,
// inverse = 1 / c.
template <class T, int ROWS>
QKV_INLINE void softcap_rows(T cap, T inverse, int64_t step, T* scores, T* tanhs) {
  Vec<T> t[ROWS];
  QKV_UNROLL
  for (int i = 0; i < ROWS; ++i) t[i] = load(scores + i * step) * inverse;
  tanh<T>(t);
  QKV_UNROLL
  for (int i = 0; i < ROWS; ++i) {
    store(scores + i * step, t[i] * cap);
    if (tanhs) store(tanhs + i * step, t[i]);
  }
}

// Caps scores [keys x lanes] in place. tanhs [keys x lanes], if not null, gets t for each of them.
template <class T>
void softcap(const Problem& p, const Tile& tile, int64_t keys, T* scores, T* tanhs) {
  const T cap = T(p.softcap), inverse = T(1 / p.softcap);
  for (int v = 0; v < tile.lanes; v += kLanes<T>) {
    in_steps<kVectorsInStep, 1>(keys, [&](int64_t j, auto rows) {
      const int64_t at = j * tile.step + v;
      softcap_rows<T, rows>(cap, inverse, tile.step, scores + at, tanhs ? tanhs + at : nullptr);
    });
  }
}

// grad_scores [keys x lanes] *= the derivative of softcap, of which `tanhs` are the t.
template <class T>
void multiply_by_slope(const Tile& tile, int64_t keys, const T* tanhs, T* grad_scores) {
  for (int64_t j = 0; j < keys; ++j)
    for (int v = 0; v < tile.lanes; v += kLanes<T>) {
      const int64_t at = j * tile.step + v;
      const Vec<T> t = load(tanhs + at);
      store(grad_scores + at, load(grad_scores + at) * (1 - t * t));
    }
}

// What it keeps of a score is t.
struct Softcap : ScoreOption<Softcap> {
  static constexpr bool kKeeps = true;

  static bool is_set(const Problem& p) { return p.softcap > 0; }

  template <class T>
  static void apply(const Problem& p, const Tile& tile, int64_t, int64_t keys, T* scores,
                    T* tanhs) {
    softcap(p, tile, keys, scores, tanhs);
  }
  template <class T>
  static void jvp(const Problem&, const JvpArgs&, const Tile& tile, int64_t, int64_t keys,
                  const T* tanhs, T* change) {
    multiply_by_slope(tile, keys, tanhs, change);
  }
  template <class T>
  static void backward(const Problem&, const BackwardArgs&, const BackwardItem&, const Tile& tile,
                       int64_t, int64_t keys, const T* tanhs, T* grad_scores) {
    multiply_by_slope(tile, keys, tanhs, grad_scores);
  }
  // second = softcap' * second + softcap'' * change * first, first = softcap' * first.
  template <class T>
  static void double_backward(const Problem& p, const BackwardArgs&, const BackwardItem&,
                              const Tile& tile, int64_t, int64_t keys, const T* tanhs,
                              const T* change, T* first, T* second) {
    const T factor = T(-2 / p.softcap);
    for (int64_t j = 0; j < keys; ++j)
      for (int v = 0; v < tile.lanes; v += kLanes<T>) {
        const int64_t at = j * tile.step + v;
        const Vec<T> t = load(tanhs + at), slope = 1 - t * t, of_first = load(first + at);
        const Vec<T> curved = load(second + at) + factor * t * load(change + at) * of_first;
        store(second + at, slope * curved);
        store(first + at, slope * of_first);
      }
  }
};

}  // namespace qkv::QKV_ISA
