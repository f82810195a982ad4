// The derivative of the softmax where a tile has all keys of its rows, which are few
// (BackwardScratch::has_few_keys): weights and delta are made of the tile's own numbers, instead of
// a pass before this one (row_sums.h) that would take as long.
#pragma once

#include "kernels/passes/grad_rows.h"
#include "kernels/score/dropout.h"
#include "kernels/score/softmax.h"
#include "kernels/simd/exp.h"

namespace qkv::QKV_ISA {

// See qkv::are_whole(); of lanes.
template <class T>
QKV_INLINE auto are_whole(Vec<T> sum, Vec<T> lse) {
  const Vec<T> most = std::numeric_limits<T>::epsilon() * (kSumRounding + max<T>(lse, -lse));
  return (sum > 0) & (1 - sum <= most) & (sum - 1 <= most * sum);
}

// One vector of lanes: weights and grad_scores begin with it. Scores and dP, which is 0 where
// dropout drops the pair, become weights and dS. `sink` is the weight of the sink.
template <class T>
QKV_INLINE void grad_whole_rows(const GradLanes<T>& lanes, bool hides, Vec<T> sink, Vec<T> lse,
                                Vec<T> grad_lse, int64_t keys, int64_t step, T* weights,
                                T* grad_scores) {
  Vec<T> sum = sink, dot{};
  for (int64_t j = 0; j < keys; ++j) {
    T *const weight = weights + j * step, *const grad = grad_scores + j * step;
    const Vec<T> score = load(weight);
    Vec<T> of[] = {score};
    exp<T>(of, lanes.by);
    of[0] *= lanes.factor;
    // dP of a hidden pair may be anything, NaN included.
    if (hides) store(grad, score == -kInfinity<T> ? Vec<T>{} : load(grad));
    store(weight, of[0]);
    sum += of[0], dot += of[0] * load(grad);
  }
  const auto is_whole = are_whole<T>(sum, lse);
  const Vec<T> divisor = is_whole ? sum : splat(T(1));
  const Vec<T> own = dot / divisor - grad_lse;
  // Of infinite dP, <dO, O> may be infinite where the sum is NaN: infinities behave here as in all
  // other tiles.
  const auto is_finite = is_whole & (own * 0 == 0);
  const Vec<T> delta = is_finite ? own : lanes.delta;
  for (int64_t j = 0; j < keys; ++j) {
    T *const weight = weights + j * step, *const grad = grad_scores + j * step;
    const Vec<T> share = load(weight) / divisor;
    store(weight, share);
    store(grad, share * (load(grad) - delta));
  }
}

// What weights_and_gradients (grad_tile.h) does for other tiles.
template <class E, class T = Compute<E>>
void grad_whole_tile(const Problem& p, const BackwardArgs& a, const BackwardTile<E>& t, int64_t key,
                     int64_t keys, T* weights, T* grad_scores, const BackwardScratch<E>& s) {
  const Tile& tile = t.tile;
  T lse[kTileRows<T>] = {}, grad_lse[kTileRows<T>] = {};
  const auto read = [&](const Input& from, T* to) {
    const Rows<const T> rows = rows_of<T>(p, from, tile.plane);
    for (int r = 0; rows.data && r < tile.rows; ++r) to[r] = *rows[tile.row + r];
  };
  read(a.lse, lse), read(a.grad_lse, grad_lse);
  if (p.dropout_p > 0) drop_weights(p, s.dropout, tile, key, keys, grad_scores);
  const bool hides = s.hides_pairs && !s.needs_marks;
  for (int v = 0; v < tile.lanes; v += kLanes<T>) {
    const GradLanes<T> lanes = s.lanes(t.lane + v);
    const Vec<T> base = load(s.base + t.lane + v);
    Vec<T> sink[] = {Vec<T>{}};
    if (p.by_head[kSinks].data) {
      sink[0] = per_head<T>(p, tile, p.by_head[kSinks], v / kLanes<T>) - base;
      exp<T>(sink, lanes.by);
      sink[0] *= lanes.factor;
    }
    subtract_base<T>(base, keys, tile.step, weights + v);
    grad_whole_rows<T>(lanes, hides, sink[0], load(lse + v), load(grad_lse + v), keys, tile.step,
                       weights + v, grad_scores + v);
  }
  if (p.dropout_p > 0) drop_weights(p, s.dropout, tile, key, keys, weights);
}

}  // namespace qkv::QKV_ISA
