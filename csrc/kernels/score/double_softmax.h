// The second derivative of the softmax (docs/report.md, pass 2). Of one pair, with P its
// weight, g and g' what grad_output makes of its value and of its value's direction, and T the
// change of its score:
//
//   W = P * (g - delta)                              the gradient of the score
//   P' = P * (T - lse')                              how the weight changes
//   W' = P' * (g - delta) + P * (g' - delta')        how the gradient changes
//
// g, g' and P' are 0 where dropout drops the pair.
#pragma once

#include "kernels/passes/double_backward_state.h"
#include "kernels/score/softmax.h"
#include "kernels/simd/exp.h"

namespace qkv::QKV_ISA {

// The tiles of the formulas [keys x lanes]; each is replaced by what its second name says.
template <class T>
struct DoubleTiles {
  T* weights;            // the score; P'
  T* grad_scores;        // g; W
  T* change;             // T; W'
  const T* grad_change;  // g'
  const T* kept;         // 1 for a pair that dropout keeps, 0 for others; null: it keeps all
};

// The statistics of one vector of lanes (DoubleScratch).
template <class T>
struct DoubleLanes {
  ShiftedExp<T> by[1];
  Vec<T> factor, delta, lse_jvp, delta_jvp;
};

// One vector of lanes and ROWS keys, from element `at` of the tiles on.
template <class T, bool hides, bool drops, int ROWS>
QKV_INLINE void double_softmax_rows(const DoubleLanes<T>& lanes, int64_t step, int64_t at,
                                    const DoubleTiles<T>& tiles) {
  Vec<T> score[ROWS], weight[ROWS];
  QKV_UNROLL
  for (int i = 0; i < ROWS; ++i) weight[i] = score[i] = load(tiles.weights + at + i * step);
  exp<T>(weight, lanes.by);
  QKV_UNROLL
  for (int i = 0; i < ROWS; ++i) {
    const int64_t pair = at + i * step;
    const Vec<T> kept = drops ? load(tiles.kept + pair) : splat(T(1)),
                 change = load(tiles.change + pair);
    Vec<T> grad = load(tiles.grad_scores + pair), grad_change = load(tiles.grad_change + pair);
    if (drops) grad *= kept, grad_change *= kept;
    const Vec<T> p = weight[i] * lanes.factor, difference = grad - lanes.delta;
    Vec<T> first = p * difference, weight_change = p * (change - lanes.lse_jvp);
    Vec<T> second = weight_change * difference + p * (grad_change - lanes.delta_jvp);
    if (drops) weight_change *= kept;
    // What has been made of a hidden pair may be anything, NaN included.
    if (hides) {
      const auto hidden = score[i] == -kInfinity<T>;
      first = hidden ? Vec<T>{} : first, second = hidden ? Vec<T>{} : second;
      weight_change = hidden ? Vec<T>{} : weight_change;
    }
    store(tiles.weights + pair, weight_change);
    store(tiles.grad_scores + pair, first);
    store(tiles.change + pair, second);
  }
}

// `lane` is the tile's first row in the block of rows. With hides, a score of -inf gets zeros,
// which is right for all rows whose statistics are finite.
template <bool hides, bool drops, class E, class T = Compute<E>>
void double_softmax(const Tile& tile, int64_t lane, int64_t keys, const DoubleTiles<T>& tiles,
                    const DoubleScratch<E>& s) {
  constexpr int kRows = kVectorsInStep / 2;  // there are more vectors to a row than in grad_softmax
  for (int64_t v = 0; v < tile.lanes; v += kLanes<T>) {
    const auto of = [&](const T* statistic) { return load(statistic + lane + v); };
    const DoubleLanes<T> lanes{
        {ShiftedExp<T>(of(s.shift))}, of(s.factor), of(s.delta), of(s.lse_jvp), of(s.delta_jvp)};
    subtract_base<T>(of(s.base), keys, tile.step, tiles.weights + v);
    const auto run = [&](auto rows, int64_t j) {
      double_softmax_rows<T, hides, drops, rows>(lanes, tile.step, v + j * tile.step, tiles);
    };
    int64_t j = 0;
    for (; j + kRows <= keys; j += kRows) run(std::integral_constant<int, kRows>(), j);
    for (; j < keys; ++j) run(std::integral_constant<int, 1>(), j);
  }
}

}  // namespace qkv::QKV_ISA
