// What the backward pass does with one tile of rows against one block of keys.
#pragma once

#include "kernels/passes/grad_rows.h"
#include "kernels/products/few_rows.h"
#include "kernels/products/products.h"
#include "kernels/score/dropout.h"
#include "kernels/score/few_softmax.h"
#include "kernels/score/grad_softmax.h"
#include "kernels/score/score.h"
#include "kernels/score/whole_rows.h"
#include "repair/marks.h"

namespace qkv::QKV_ISA {

// Turns scores and dP [keys x lanes] into P and dS, in place.
template <class E, class T = Compute<E>>
void weights_and_gradients(const Problem& p, const BackwardTile<E>& t, int64_t key, int64_t keys,
                           T* weights, T* grad_scores, const BackwardScratch<E>& s) {
  const bool hides = s.hides_pairs && !s.needs_marks;
  (hides ? grad_softmax<true, E> : grad_softmax<false, E>)(t.tile, t.lane, keys, weights,
                                                           grad_scores, s);
  if (p.dropout_p > 0)
    drop_weights_backward(p, s.dropout, t.tile, key, keys, s.delta + t.lane, weights, grad_scores);
}

// scores [keys x lanes] = the scores of keys [key, key + keys), before any option, made as the
// forward pass makes them.
template <class E, class T = Compute<E>>
void scores_of_tile(const BackwardTile<E>& t, int64_t key, int64_t keys, T* scores,
                    const BackwardScratch<E>& s) {
  if (!s.few_query)
    return multiply_rows(t.tile, s.keys.rows(key, keys), t.query, scores, Beta::zero, s.ahead);
  few_scores_of_tile<E>(t.tile, s.keys.source(), key, keys, s.few_query, scores);
}

// dP^T = V dO^T, or zeros where there is no grad_output: to [keys x lanes] from rows of values.
template <class E, class T = Compute<E>>
void multiply_grad_output(const BackwardTile<E>& t, const LeftOperand<Factor<E>>& values, T* to,
                          Ahead* ahead) {
  if (t.grad_output.data)
    multiply_rows(t.tile, values, t.grad_output, to, Beta::zero, ahead);
  else
    clear_tile(t.tile, values.rows, to);
}

#ifdef QKV_CHECK_SCORES
// Stops the program where a score is larger than the log-sum-exp of its row by more than that was
// rounded: the forward pass has then made it in another way (ScoreWay).
template <class T>
void check_scores(const Rows<const T>& lse, const Tile& tile, int64_t keys, const T* scores) {
  constexpr T kEpsilon = std::numeric_limits<T>::epsilon();
  for (int r = 0; r < tile.rows; ++r) {
    const T top = *lse[tile.row + r], slack = kEpsilon * (4 + 2 * std::abs(top));
    for (int64_t j = 0; j < keys; ++j)
      if (scores[j * tile.step + r] > top + slack) __builtin_trap();
  }
}
#endif

// Computes P and dS of one tile of rows and keys [key, key + keys) into s.weights and
// s.grad_scores, where the tile begins at element `at`.
template <class E>
void grad_scores_of_tile(const Problem& p, const BackwardArgs& a, const BackwardTile<E>& t,
                         int64_t key, int64_t keys, int64_t at, const BackwardScratch<E>& s) {
  using T = Compute<E>;
  T *weights = s.weights + at, *grad_scores = s.grad_scores + at;
  scores_of_tile(t, key, keys, weights, s);
  apply_score_options(p, t.tile, key, keys, weights, s.kept.at(at));
#ifdef QKV_CHECK_SCORES
  check_scores(rows_of<T>(p, a.lse, t.tile.plane), t.tile, keys, weights);
#endif
  multiply_grad_output(t, s.values.rows(key, keys), grad_scores, s.ahead);
  if (a.grad_weights.data) {
    read_tile<T>(p, score_rows_of<T>(p, a.grad_weights, t.tile.plane), t.tile, key, keys,
                 [&](int64_t j, int v, Vec<T> grad) {
                   T* to = grad_scores + j * kGradRows + v;
                   store(to, load(to) + grad * s.dropout.scale);
                 });
  }
  if (s.has_few_keys) {
    // dP of a hidden pair may be NaN, and would be a part of its row's delta.
    if (s.needs_marks)
      mark_pairs<T, 1>(p, t.tile, key, keys, weights, t.tile.step, s.marks + at, {grad_scores});
    grad_whole_tile(p, a, t, key, keys, weights, grad_scores, s);
  } else {
    weights_and_gradients(p, t, key, keys, weights, grad_scores, s);
  }
  if (!s.needs_marks) return;
  mark_pairs<T, 2>(p, t.tile, key, keys, weights, t.tile.step, s.marks + at,
                   {weights, grad_scores});
}

// Computes P and dS of one tile and everything that is made of them but dK and dV: the
// gradients of masks and slopes, and dQ.
template <class E>
void grad_tile(const Problem& p, const BackwardArgs& a, const BackwardItem& item,
               const BackwardTile<E>& t, int64_t key, int64_t keys, int64_t at,
               BackwardScratch<E>& s) {
  using T = Compute<E>;
  const Tile& tile = t.tile;
  T* grad_scores = s.grad_scores + at;
  grad_scores_of_tile(p, a, t, key, keys, at, s);
  // A dQ that is NaN all over is left alone, since nothing changes it any more. The same goes for
  // dK and dV in add_grad_key_value.
  const bool grads_query =
      a.grad_query.data && !(s.needs_marks && all_nan(t.grad_query, t.sum_size(p.head_dim)));
  const bool changes = changes_gradients(p);
  const bool hides_nonfinite = s.hides_pairs && (grads_query || changes) &&
                               s.keys.hides_nonfinite(p, tile, key, keys, s.weights + at);
  score_options_backward(p, a, item, tile, key, keys, s.kept.at(at), grad_scores);
  if (changes && (hides_nonfinite || s.needs_marks))
    mark_pairs<T, 1>(p, tile, key, keys, s.weights + at, tile.step, s.marks + at, {grad_scores});
  if (!grads_query) return;
  s.keys.add_grad_query(t, key, keys, s.as_b, grad_scores, s.sees_few, hides_nonfinite);
}

}  // namespace qkv::QKV_ISA
