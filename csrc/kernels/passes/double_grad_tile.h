// What the pass for second derivatives does with one tile of rows against one block of keys.
#pragma once

#include "kernels/passes/double_backward_state.h"
#include "kernels/passes/grad_tile.h"
#include "kernels/products/products.h"
#include "kernels/score/double_softmax.h"
#include "kernels/score/dropout.h"
#include "kernels/score/score.h"
#include "repair/marks.h"

namespace qkv::QKV_ISA {

// s.change = how scores of keys [key, key + keys) change, after the scores themselves.
template <class E, class T = Compute<E>>
void changes_of_tile(const Problem& p, const DoubleTile<E>& t, int64_t key, int64_t keys,
                     int64_t at, const DoubleScratch<E>& s) {
  T* const change = s.change + at;
  if (s.moves_query()) multiply_rows(t.tile, s.keys.rows(key, keys), t.query_jvp, change);
  if (s.moves_key())
    multiply_rows(t.tile, s.keys_jvp.rows(key, keys), t.query, change,
                  s.moves_query() ? Beta::one : Beta::zero);
  if (!s.moves_query() && !s.moves_key()) clear_tile(t.tile, keys, change);
  score_options_jvp(p, s.direction.along, t.tile, key, keys, s.kept.at(at), change,
                    s.changes.at(at));
}

// Turns the tiles' products into what double_softmax.h describes, in place.
template <class E, class T = Compute<E>>
void differentiate_twice(const Problem& p, const DoubleTile<E>& t, int64_t key, int64_t keys,
                         int64_t at, const DoubleScratch<E>& s) {
  const bool hides = s.hides_pairs && !s.needs_marks, drops = p.dropout_p > 0;
  if (drops)
    s.dropout(p, t.tile, key, keys, [&](int64_t j, int lane, IntVec<T> kept) {
      store(s.kept_pairs + at + j * kGradRows + lane, kept ? splat(T(1)) : Vec<T>{});
    });
  const DoubleTiles<T> tiles{s.weights + at, s.grad_scores + at, s.change + at, s.grad_change + at,
                             drops ? s.kept_pairs + at : nullptr};
  const auto run = drops   ? hides ? double_softmax<true, true, E> : double_softmax<false, true, E>
                   : hides ? double_softmax<true, false, E>
                           : double_softmax<false, false, E>;
  run(t.tile, t.lane, keys, tiles, s);
  if (s.needs_marks)
    mark_pairs<T, 3>(p, t.tile, key, keys, s.weights + at, t.tile.step, s.marks + at,
                     {s.weights + at, s.grad_scores + at, s.change + at});
}

// Computes P', W and W' of one tile of rows and keys [key, key + keys) into s.weights,
// s.grad_scores and s.change, where the tile begins at element `at`.
template <class E>
void double_scores_of_tile(const Problem& p, const DoubleTile<E>& t, int64_t key, int64_t keys,
                           int64_t at, const DoubleScratch<E>& s) {
  scores_of_tile(t, key, keys, s.weights + at, s);
  apply_score_options(p, t.tile, key, keys, s.weights + at, s.kept.at(at));
  changes_of_tile(p, t, key, keys, at, s);
  multiply_grad_output(t, s.values.rows(key, keys), s.grad_scores + at, s.ahead);
  if (s.moves_value())
    multiply_grad_output(t, s.values_jvp.rows(key, keys), s.grad_change + at, s.ahead);
  else
    clear_tile(t.tile, keys, s.grad_change + at);
  differentiate_twice(p, t, key, keys, at, s);
}

// The overload of grad_tile.h's function.
template <class E>
void grad_tile(const Problem& p, const BackwardArgs& a, const BackwardItem& item,
               const DoubleTile<E>& t, int64_t key, int64_t keys, int64_t at, DoubleScratch<E>& s) {
  using T = Compute<E>;
  const Tile& tile = t.tile;
  T *first = s.grad_scores + at, *second = s.change + at;
  double_scores_of_tile(p, t, key, keys, at, s);
  const bool grads_query =
      a.grad_query.data && !(s.needs_marks && all_nan(t.grad_query, t.sum_size(p.head_dim)));
  const bool changes = changes_gradients(p), looks = s.hides_pairs && (grads_query || changes);
  const bool repairs = looks && s.keys.hides_nonfinite(p, tile, key, keys, first);
  const bool repairs_jvp =
      looks && s.moves_key() && s.keys_jvp.hides_nonfinite(p, tile, key, keys, first);
  score_options_double_backward(p, a, item, tile, key, keys, s.kept.at(at), s.changes.at(at), first,
                                second);
  if (changes && (repairs || repairs_jvp || s.needs_marks))
    mark_pairs<T, 2>(p, tile, key, keys, s.weights + at, tile.step, s.marks + at, {first, second});
  if (!grads_query) return;
  s.keys.add_grad_query(t, key, keys, s.as_b, second, s.sees_few, repairs);
  if (s.moves_key())
    s.keys_jvp.add_grad_query(t, key, keys, s.as_b, first, s.sees_few, repairs_jvp);
}

}  // namespace qkv::QKV_ISA
