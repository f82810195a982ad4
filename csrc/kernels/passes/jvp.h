// Forward-mode derivatives over one ForwardItem: the forward pass with a second tile beside that of
// the scores, in which stand the changes of the scores. docs/kernels.md has the products
// ("Forward mode"), attention_jvp.h the formulas.
#pragma once

#include "kernels/passes/forward.h"
#include "kernels/passes/jvp_state.h"
#include "kernels/passes/walk.h"
#include "kernels/score/dropout.h"
#include "kernels/score/few_softmax.h"
#include "kernels/score/score.h"
#include "kernels/score/score_jvp.h"
#include "kernels/score/softmax.h"
#include "repair/marks.h"

namespace qkv::QKV_ISA {

template <class E, class T = Compute<E>>
void begin_jvp_tile(const Problem& p, const JvpArgs& a, const Tile& tile, JvpScratch<E>& s,
                    JvpState<T>& state) {
  state.tile = tile;
  state.is_finite = true;
  const auto pack = [&](const Input& input, T* memory) {
    s.query_rows.read(rows_of<E>(p, input, tile.plane), tile.row, tile.rows, tile.lanes);
    if (hides_any(p))
      state.is_finite &= all_finite(s.query_rows.natural(), tile.rows * s.query_rows.step());
    return s.query_rows.pack(0, tile.lanes, T(p.scale), memory);
  };
  state.query = pack(p.query, state.query_memory);
  if (s.few_query) pack_few_queries<E>(p, tile.plane, tile.row, tile.rows, s.few_query);
  if (a.query.data) state.query_jvp = pack(a.query, state.query_jvp_memory);
  for (T* output : {state.output, state.output_jvp})
    std::fill_n(output, tile.lanes * padded<T>(p.head_dim_v), T(0));
  std::fill_n(state.max, tile.lanes, -kInfinity<T>);
  std::fill_n(state.sum, tile.lanes, T(0));
  std::fill_n(state.sum_jvp, tile.lanes, T(0));
  if (p.by_head[kSinks].data) add_sinks(p, tile, state.max, state.sum);
  if (p.by_head[kSinks].data && a.by_head[kSinks].data)
    add_sinks_jvp(p, a, tile, state.max, state.sum, false, state.sum_jvp);
}

// What has to be done about hidden pairs of a tile: nothing, since there are none; their changes of
// scores become 0; or, where something that pairs are made of is not finite, they are left out of
// products as well (repair/).
enum class Hidden { none, cleared, repaired };

// Scores of keys [key, key + keys), and how they change.
template <class E, class T = Compute<E>>
void scores_and_jvp(const Problem& p, const JvpArgs& a, int64_t key, int64_t keys, Hidden hidden,
                    const JvpScratch<E>& s, const JvpState<T>& state) {
  const Tile& tile = state.tile;
  if (s.few_query)
    few_scores_of_tile<E>(tile, s.keys.source(), key, keys, s.few_query, s.scores);
  else
    multiply_rows(tile, s.keys.rows(key, keys), state.query, s.scores);
  apply_score_options(p, tile, key, keys, s.scores, s.kept);
  if (!s.with_scores) return;
  Beta beta = Beta::zero;
  if (a.query.data) {
    multiply_rows(tile, s.keys.rows(key, keys), state.query_jvp, s.scores_jvp, beta);
    beta = Beta::one;
  }
  if (a.key.data)
    multiply_rows(tile, s.keys_jvp.rows(key, keys), state.query, s.scores_jvp, beta);
  else if (!a.query.data)
    std::fill_n(s.scores_jvp, keys * tile.step, T(0));
  score_options_jvp(p, a, tile, key, keys, s.kept, s.scores_jvp);
  if (hidden == Hidden::repaired)
    mark_pairs<T, 1>(p, tile, key, keys, s.scores, tile.step, s.marks, {s.scores_jvp});
  else if (hidden == Hidden::cleared)
    clear_hidden_jvp(tile, keys, s.scores, s.scores_jvp);
}

// Adds keys [key, key + keys), with weights and weighed changes of scores in the scratch memory, to
// the sums of a tile.
template <class E, class T = Compute<E>>
void add_values_and_jvp(int64_t key, int64_t keys, Hidden hidden, JvpScratch<E>& s,
                        const JvpState<T>& state) {
  const Tile& tile = state.tile;
  const auto sum = [&](T* to, Beta beta) {
    return Sum<T>{to, tile.lanes, beta, nullptr, s.rescale};
  };
  const auto of = [&](auto& nonfinite) {
    return hidden == Hidden::repaired ? &*nonfinite : nullptr;
  };
  if (s.with_output)
    s.values.add_columns(tile, key, keys, s.scores, sum(state.output, Beta::lanes),
                         of(s.nonfinite_values), s.scores);
  Beta beta = Beta::lanes;
  if (s.values_jvp) {
    s.values_jvp.add_columns(tile, key, keys, s.scores, sum(state.output_jvp, beta),
                             of(s.nan_values_jvp), s.scores);
    beta = Beta::one;
  }
  if (s.with_scores)
    s.values.add_columns(tile, key, keys, s.scores_jvp, sum(state.output_jvp, beta),
                         of(s.nan_values), s.scores);
}

// One tile of queries against keys [key, key + keys), which are loaded.
template <class E, class T = Compute<E>>
void attend_jvp(const Problem& p, const JvpArgs& a, int64_t key, int64_t keys, JvpScratch<E>& s,
                const JvpState<T>& state) {
  const Tile& tile = state.tile;
  const Hidden hidden = !hides_any(p) || !hides_pairs(p, tile.map_view(), key, key + keys)
                            ? Hidden::none
                        : state.is_finite && s.is_block_finite() ? Hidden::cleared
                                                                 : Hidden::repaired;
  scores_and_jvp(p, a, key, keys, hidden, s, state);
  softmax_tile(tile.lanes, keys, s.scores, state.max, state.sum, s.rescale);
  weigh_jvp(tile, s.with_scores ? keys : 0, s.scores, s.rescale, s.scores_jvp, state.sum_jvp);
  if (p.dropout_p > 0) {
    drop_weights(p, s.dropout, tile, key, keys, s.scores);
    if (s.with_scores) drop_weights(p, s.dropout, tile, key, keys, s.scores_jvp);
  }
  add_values_and_jvp(key, keys, hidden, s, state);
}

// Turns the sums of a tile into output and output', in place, and sum_jvp into lse'.
template <class E, class T = Compute<E>>
void divide_sums(const Problem& p, const JvpArgs& a, JvpScratch<E>& s, const JvpState<T>& state) {
  const Tile& tile = state.tile;
  const int64_t dim = padded<T>(p.head_dim_v);
  if (!s.with_output) {
    gather_rows(rows_of<E>(p, a.output, tile.plane), tile.row, tile.rows, tile.lanes, p.head_dim_v,
                s.rows);
    transpose<T>(s.rows, dim, state.output, tile.lanes, tile.lanes, dim, 1);
  }
  for (int v = 0; v < tile.lanes; v += kLanes<T>) {
    const Vec<T> sum = load(state.sum + v);
    const Vec<T> factor = sum == 0 ? Vec<T>{} : T(dropout_scale(p.dropout_p)) / sum;
    const Vec<T> lse_jvp = load(state.sum_jvp + v) / (sum == 0 ? splat(T(1)) : sum);
    store(state.sum_jvp + v, lse_jvp);
    for (int64_t d = 0; d < p.head_dim_v; ++d) {
      T *output = state.output + d * tile.lanes + v, *jvp = state.output_jvp + d * tile.lanes + v;
      const Vec<T> o = s.with_output ? load(output) * factor : load(output);
      store(output, o);
      store(jvp, load(jvp) * factor - lse_jvp * o);
    }
  }
}

template <class E, class T = Compute<E>>
void finish_jvp_tile(const Problem& p, const JvpArgs& a, const JvpResult& result, JvpScratch<E>& s,
                     const JvpState<T>& state) {
  const Tile& tile = state.tile;
  if (p.by_head[kSinks].data) finish_sinks(p, tile, state.max, state.sum);
  if (p.by_head[kSinks].data && a.by_head[kSinks].data)
    add_sinks_jvp(p, a, tile, state.max, state.sum, true, state.sum_jvp);
  divide_sums(p, a, s, state);
  const auto write = [&](const T* sums, const T* numbers, const Output& output,
                         const Output& of_rows) {
    const Rows<E> rows = rows_of<E>(p, output, tile.plane);
    const Rows<T> to = rows_of<T>(p, of_rows, tile.plane);
    if (rows.data) write_columns<E, T>(tile, p.head_dim_v, nullptr, sums, rows, tile.row);
    if (to.data) write_numbers(tile, numbers, to, tile.row);
  };
  T lse[kTileRows<T>];
  log_sum_exp<T, Reference<T>>(tile, state.max, state.sum, nullptr, lse);
  write(state.output, lse, result.output, result.lse);
  write(state.output_jvp, state.sum_jvp, result.output_jvp, result.lse_jvp);
}

template <class E>
size_t jvp(const Problem& p, const JvpArgs& a, const JvpResult& result, const ForwardItem& item,
           void* workspace) {
  using T = Compute<E>;
  Arena arena(workspace);
  JvpScratch<E> s(arena, p, a, item.row_end - item.row_begin);
  if (arena.counting()) return arena.used();
  int64_t tiles = 0;
  for (int64_t row = item.row_begin; row < item.row_end; row += kTileRows<T>, ++tiles)
    begin_jvp_tile(p, a, make_tile<T>(p, item.plane, row, item.row_end), s, s.tiles[tiles]);
  for_each_block<1>(
      p, s.tiles, tiles, {0, p.seqlen_k}, key_step(p.seqlen_k),
      [&](int64_t key, int64_t keys, int64_t) { s.load_block(item.plane, key, keys); },
      [&](const JvpState<T>& state, int64_t key, int64_t keys) {
        attend_jvp(p, a, key, keys, s, state);
      });
  for (int64_t t = 0; t < tiles; ++t) finish_jvp_tile(p, a, result, s, s.tiles[t]);
  return arena.used();
}

}  // namespace qkv::QKV_ISA
