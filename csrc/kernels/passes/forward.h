// The forward pass over one ForwardItem: a range of rows against a range of keys of one plane.
#pragma once

#include "kernels/passes/forward_ahead.h"
#include "kernels/passes/forward_few_rows.h"
#include "kernels/passes/forward_state.h"
#include "kernels/passes/forward_tiles.h"
#include "kernels/passes/walk.h"
#include "kernels/score/dropout.h"
#include "kernels/score/score.h"

namespace qkv::QKV_ISA {

template <class P>
void begin_tile(const Problem& p, bool with_sink, P& products, ForwardState<P>& state) {
  using T = Compute<typename P::Element>;
  const Tile& tile = state.tile;
  state.query = products.pack(tile, state.memory);
  state.has_output = !P::kOverwritesOutput;
  if (state.has_output) std::fill_n(state.output, tile.rows * p.head_dim_v, T(0));
  for (int v = 0; v < tile.lanes; v += kLanes<T>) {
    store(state.max + v, splat(-kInfinity<T>));
    store(state.sum + v, Vec<T>{});
  }
  if (with_sink) add_sinks<T, typename P::Reference>(p, tile, state.max, state.sum);
  std::copy_n(state.sum, tile.lanes, state.own_sum);
}

// Adds the values of keys [key, key + keys), times weights [keys x lanes], to the output of a tile.
// Where pairs are hidden, the new output is summed beside the old one: if a value that is not
// finite spoils it, it is summed again without the hidden pairs.
template <class P>
void add_values(const Problem& p, int64_t key, int64_t keys,
                const Compute<typename P::Element>* weights, ForwardScratch<P>& s,
                ForwardState<P>& state) {
  using T = Compute<typename P::Element>;
  const Tile& tile = state.tile;
  const T* const rescale = state.has_output ? s.rescale : nullptr;
  state.has_output = true;
  if (!hides_any(p) ||
      !hides_pairs(p, tile.map_view(), key, key + touched_keys(keys, P::kKeyMultiple)))
    return s.products.add_values(tile, key, keys, weights, rescale, state.output, state.output);
  T* const before = state.output;
  state.output = s.spare, s.spare = before;
  const bool expects_none = !s.saw_nonfinite || s.products.separate_values();
  if (expects_none) {
    s.products.add_values(tile, key, keys, weights, rescale, before, state.output);
    if (!s.products.is_spoilt(tile, state.output) || s.products.separate_values()) return;
    s.saw_nonfinite = true;
  }
  if (s.products.hides_nonfinite(tile, key, keys, weights))
    s.products.add_visible_values(tile, key, keys, weights, rescale, before, state.output);
  else if (!expects_none)
    s.products.add_values(tile, key, keys, weights, rescale, before, state.output);
}

// Makes the weights of one tile of queries for keys [key, key + keys), relative to the largest
// score so far, and returns them as add_values takes them. scratch.rescale: see softmax_tile.
template <class P>
const Compute<typename P::Element>* weigh(const Problem& p, int64_t key, int64_t keys,
                                          ForwardScratch<P>& scratch, ForwardState<P>& state) {
  using T = Compute<typename P::Element>;
  T* scores = state.weights.extend(state.tile, key, keys, scratch.scores);
  scratch.products.scores(state.tile, key, keys, state.query, scores);
  apply_score_options<T>(p, state.tile, key, keys, scores);
  const auto& output = scratch.products.output_sum();
  output.softmax(state.tile, keys, scores, state.max, state.sum, state.own_sum, scratch.rescale);
  if (p.dropout_p > 0) {
    drop_weights(p, scratch.dropout, state.tile, key, keys, scores);
    output.change_weights(state.tile, keys, scores);
  }
  return scores;
}

// The same for few rows, whose scores are [rows x keys]. Options work on tiles: where there are
// any, the scores become a tile and come back.
template <class E, class K>
const Compute<E>* weigh(const Problem& p, int64_t key, int64_t keys,
                        ForwardScratch<ForwardFewRows<E, K>>& scratch,
                        ForwardState<ForwardFewRows<E, K>>& state) {
  using T = Compute<E>;
  const Tile& tile = state.tile;
  T* scores = scratch.products.scores(tile, key, keys, state.query);
  if (changes_scores(p, tile, key, keys)) {
    few_to_tile(tile, keys, scores, scratch.scores);
    apply_score_options<T>(p, tile, key, keys, scratch.scores);
    few_from_tile(tile, keys, scratch.scores, scores);
  }
  scratch.products.softmax(tile, keys, scores, state.max, state.sum, state.own_sum,
                           scratch.rescale);
  if (p.dropout_p > 0 || state.weights.are_wanted()) {
    T* const weights = state.weights.extend(tile, key, keys, scratch.scores);
    few_to_tile(tile, keys, scores, weights);
    if (p.dropout_p > 0) {
      drop_weights(p, scratch.dropout, tile, key, keys, weights);
      few_from_tile(tile, keys, weights, scores);
    }
  }
  return scores;
}

// How many of keys [key, key + keys), of one block, are attended to at once: as many as a tile has
// room for, where the scores of few rows become one.
template <class P>
int64_t keys_at_once(const Problem&, int64_t, int64_t keys, const ForwardState<P>&) {
  return keys;
}
template <class E, class K>
int64_t keys_at_once(const Problem& p, int64_t key, int64_t keys,
                     const ForwardState<ForwardFewRows<E, K>>& state) {
  const bool in_tiles =
      p.dropout_p > 0 || state.weights.are_wanted() || changes_scores(p, state.tile, key, keys);
  return in_tiles ? kFewTileKeys : keys;
}

// Weights and output of one tile of queries for keys [key, key + keys).
template <class P>
void attend(const Problem& p, int64_t key, int64_t keys, ForwardScratch<P>& scratch,
            ForwardState<P>& state) {
  const int64_t most = keys_at_once(p, key, keys, state), end = key + keys;
  for (; key < end; key += most) {
    const int64_t count = std::min(most, end - key);
    const auto* weights = weigh(p, key, count, scratch, state);
    state.weights.rescale(state.tile, key, scratch.rescale);
    add_values(p, key, count, weights, scratch, state);
  }
}

template <class P>
size_t forward_by(const Problem& p, const ForwardResult& result, const ForwardItem& item,
                  void* workspace) {
  using T = Compute<typename P::Element>;
  Arena arena(workspace);
  ForwardScratch<P> scratch(arena, p, item.row_end - item.row_begin, result.weights.data);
  if (arena.counting()) return arena.used();

  const bool with_sink = p.by_head[kSinks].data && item.key_begin == 0;
  int64_t tiles = 0;
  for (int64_t row = item.row_begin; row < item.row_end; row += kTileRows<T>, ++tiles) {
    ForwardState<P>& state = scratch.tiles[tiles];
    // The tile is made in place: a copy of what was just written, by wider loads than the stores
    // were, would wait until they have left for the cache.
    new (&state.tile) Tile(make_tile<T>(p, item.plane, row, item.row_end));
    begin_tile(p, with_sink, scratch.products, state);
  }
  const Range item_keys{item.key_begin, item.key_end};
  const int64_t step = scratch.products.block_keys(item.key_end - item.key_begin);
  ForwardAhead<P> ahead(p, result, item, step, scratch.products);
  for_each_block<P::kKeyMultiple>(
      p, scratch.tiles, tiles, item_keys, step,
      [&](int64_t key, int64_t keys, int64_t last) {
        ahead.begin_block(key + keys, last);
        scratch.products.load_block(item.plane, key, keys);
      },
      [&](ForwardState<P>& state, int64_t key, int64_t keys) {
        attend(p, key, keys, scratch, state);
      });
  for (int64_t t = 0; t < tiles; ++t) finish_tile(p, result, item, scratch, scratch.tiles[t]);
  return arena.used();
}

// Whether there are kernels for int8 keys and values beside queries of type E: what multiplies
// pairs has none (kernels_for in kernel_table.h), and neither has f64.
template <class E>
constexpr bool kTakesInt8 = !kInPairs<E> && !std::is_same_v<E, double>;

template <class E>
size_t forward(const Problem& p, const ForwardResult& result, const ForwardItem& item,
               void* workspace) {
  const bool few = has_few_rows<E>(p);
  if constexpr (kTakesInt8<E>)
    if (p.is_int8())
      return (few ? forward_by<ForwardFewRows<E, int8_t>>
                  : forward_by<ForwardTiles<E, int8_t>>)(p, result, item, workspace);
  return (few ? forward_by<ForwardFewRows<E>> : forward_by<ForwardTiles<E>>)(p, result, item,
                                                                             workspace);
}

}  // namespace qkv::QKV_ISA
