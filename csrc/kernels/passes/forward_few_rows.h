// How the forward pass multiplies planes of few rows (products/few_rows.h).
#pragma once

#include "kernels/products/few_columns.h"
#include "kernels/products/few_pair_values.h"
#include "kernels/products/few_pairs.h"
#include "kernels/products/few_scales.h"
#include "kernels/score/few_softmax.h"
#include "repair/counts.h"
#include "repair/marks.h"

namespace qkv::QKV_ISA {

// The counterpart of ForwardTiles, whose functions are described there, but for block_keys and
// scores. Output is [rows, Dv], and weights are [rows x keys] (products/few_rows.h).
// K is what keys and values are in memory: E, or int8, whose scales multiply scores and weights.
template <class E, class K = E>
class ForwardFewRows {
  using T = Compute<E>;
  static constexpr bool kHasScales = !std::is_same_v<K, E>;
  static constexpr bool kMayRound = kMayMultiplyPairs<E, K> && !kHasScales;  // weights, to E

 public:
  using Element = E;
  using Factor = T;
  using Query = const T*;  // of pack_few_queries
  // What weights are relative to.
  using Reference = std::conditional_t<kMayRound, LargestScore<T>, QKV_ISA::Reference<T>>;
  static constexpr int64_t kKeyMultiple = 1;
  static constexpr bool kOverwritesOutput = false;

  ForwardFewRows(Arena& arena, const Problem& p)
      : p_(p),
        values_in_pairs_(multiplies_pairs<E, K>(p.head_dim_v)),
        scores_(arena.take<T>(kHasRests<K> ? 2 * kFewScores : p.plane_rows() * kFewStep)),
        places_(arena.take<const K*>(2 * kFewKeys + kFewPlaces + kFewMostAhead)),
        marks_(hides_any(p) ? arena.take<T>(kFewTileKeys * kTileRows<T>) : nullptr),
        tile_weights_(hides_any(p) ? arena.take<T>(kFewTileKeys * kTileRows<T>) : nullptr),
        zeros_(hides_any(p) ? arena.take<K>(p.head_dim_v) : nullptr),
        columns_(kFixedBits ? arena.take<T>(2 * kLanes<T> * p.head_dim) : nullptr),
        scales_(kHasScales ? arena.take<T>(kFewStep) : nullptr),
        scaled_weights_(kHasScales ? arena.take<T>(kFewScores) : nullptr),
        words_(values_in_pairs_ ? arena.take<Word<K>>(kFewScores) : nullptr) {
    if (zeros_ && !arena.counting()) std::fill_n(zeros_, p.head_dim_v, K{});
  }

  int64_t block_keys(int64_t) const { return few_block_keys<K>(p_.head_dim); }
  static int64_t query_size(const Problem& p) { return few_query_size<E, K>(p); }
  static int64_t output_size(const Problem& p) { return kTileRows<T> * p.head_dim_v; }
  static bool has_own_sum(const Problem& p) {
    return kMayRound && multiplies_pairs<E, K>(p.head_dim_v) && p.dropout_p == 0;
  }

  Query pack(const Tile& tile, T* memory) const {
    if constexpr (kFixedBits)
      pack_few_rows<E>(p_, tile.plane, tile.row, tile.rows, memory);
    else
      pack_few_queries<E, K>(p_, tile.plane, tile.row, tile.rows, memory);
    return memory;
  }

  // Nothing is copied: products read the user's memory.
  void load_block(Plane plane, int64_t, int64_t) {
    keys_ = key_rows<K>(p_, plane);
    values_ = value_rows<K>(p_, plane);
  }

  // Returns scores [rows x keys] of keys [key, key + keys), before any option. The functions below
  // are to be called for the same keys, next.
  T* scores(const Tile& tile, int64_t key, int64_t keys, Query query) {
    multiply_keys(tile.rows, find(tile.rows, key, keys), query);
    if constexpr (kHasScales) scale_scores(tile, key, keys);
    return scores_;
  }

  void softmax(const Tile& tile, int64_t keys, T* scores, T* max_state, T* sum_state, T* own_sum,
               T* rescale) const {
    softmax_few<Reference>(tile, keys, scores, max_state, sum_state, rescale);
    if constexpr (kMayRound)
      if (has_own_sum(p_)) add_rounded_weights(tile, keys, scores, rescale, own_sum);
  }

  void add_values(const Tile& tile, int64_t key, int64_t keys, const T* weights, const T* rescale,
                  const T* before, T* output) {
    weights = of_elements(tile, key, keys, weights);
    add_weighted(tile.rows, at_values_, weights, rescale, before, output);
  }

  // Hidden pairs are left out of the sums, which otherwise are those of add_values, to the last
  // bit: 0 times a finite value changes none.
  bool hides_nonfinite(const Tile& tile, int64_t key, int64_t keys, const T* weights) {
    few_to_tile(tile, keys, weights, tile_weights_);
    return mark_pairs(p_, tile, key, keys, tile_weights_, tile.step, marks_);
  }
  void add_visible_values(const Tile& tile, int64_t key, int64_t keys, const T* weights,
                          const T* rescale, const T* before, T* output) {
    weights = of_elements(tile, key, keys, weights);
    for (int r = 0; r < tile.rows; ++r) {
      const K* seen[kFewStep];
      T seen_weights[kFewStep] = {};
      std::fill_n(seen, kFewStep, zeros_);
      for (int64_t j = 0; j < keys; ++j)
        if (marks_[j * tile.step + r] != 0)
          seen[j] = at_values_.rows[j], seen_weights[j] = weights[r * kFewStep + j];
      const int64_t at = r * p_.head_dim_v;
      add_weighted(1, {seen, keys, 0, at_values_.turn}, seen_weights, rescale + r, before + at,
                   output + at);
    }
  }

  // Values are read where they are: those that are not finite cannot be separated. Once there were
  // some, all values count as not finite, and hidden pairs are left out of all products.
  static bool separate_values() { return false; }
  bool is_spoilt(const Tile&, const T* output) const { return !all_finite(output, p_.head_dim_v); }

  template <class To>
  void write(const Tile& tile, const T* factors, T* output, const Rows<To>& to,
             int64_t begin) const {
    const int64_t dim = p_.head_dim_v;
    constexpr int64_t kStep = 2 * kLanes<T>;
    for (int r = 0; r < tile.rows && !values_in_pairs_; ++r)
      for (int64_t d = 0; d + kStep <= dim; d += kStep) from_parts<K>(output + r * dim + d);
    write_rows(tile, dim, factors, output, to, begin);
  }

 private:
  // Returns where the keys of a block begin, and notes where its values do. The list of places is
  // that of the keys, then of the values, then of the first keys of the next block.
  FewPlaces<K> find(int64_t rows, int64_t key, int64_t keys) {
    next_key_ = key + keys, next_keys_ = std::min(block_keys(0), p_.seqlen_k - next_key_);
    const K** const values = few_places(keys_, key, keys, places_);
    const int64_t ahead = std::min<int64_t>(few_rows_ahead<K>(rows, keys_.dim()), values - places_);
    const K** const next = few_places(values_, key, keys, values);
    few_places(keys_, next_key_, std::min(ahead, next_keys_), next, ahead);
    for (auto* of : {&keys_, &values_}) look_up_pages(p_, *of, next_key_, next_keys_);
    const auto portions = [&](const auto& f) { for_each_portion<kFewPortion<T>>(rows, f); };
    const auto panels = [&](const auto& f) {
      values_in_pairs_ ? for_each_pair_panel(rows, p_.head_dim_v, f)
                       : for_each_panel<K>(rows, p_.head_dim_v, f);
    };
    at_values_ = {values, keys, ahead, few_turn<K>(rows, keys_.dim(), panels)};
    return {places_, keys, ahead, few_turn<K>(rows, keys_.dim(), portions)};
  }

  // scores_ = the products of `rows` queries with keys.
  void multiply_keys(int64_t rows, FewPlaces<K> keys, Query query) {
    if constexpr (kFixedBits && !kHasScales)
      return few_scores_by_columns<K>(rows, p_.head_dim, keys, query, columns_, scores_);
    few_scores<E, K>(rows, p_.head_dim, keys, query, scores_);
  }

  // Makes scores of what multiply_keys has made of int8 keys.
  void scale_scores(const Tile& tile, int64_t key, int64_t keys) const {
    const bool have_rests = !multiplies_pairs<E, K>(p_.head_dim);
    for_each_scale(
        tile.rows, keys_, key, keys, scales_, [&](int64_t at, Vec<T> scale) QKV_INLINE_LAMBDA {
          const Vec<T> score = load(scores_ + at) * scale;
          store(scores_ + at, have_rests ? score + load(scores_ + kFewScores + at) * scale : score);
        });
  }

  // What the elements of values are multiplied by: weights, times the scales of int8.
  auto* of_elements(const Tile& tile, int64_t key, int64_t keys, const T* weights) const {
    if constexpr (kHasScales) {
      for (auto* of : {&keys_, &values_}) fetch_scales(*of, next_key_, next_keys_);
      for_each_scale(tile.rows, values_, key, keys, scales_,
                     [&](int64_t at, Vec<T> scale) QKV_INLINE_LAMBDA {
                       store(scaled_weights_ + at, load(weights + at) * scale);
                     });
      return scaled_weights_;
    } else {
      return weights;
    }
  }

  // output [rows, Dv] = rescale * before + weights [rows x keys] of their elements * values.
  void add_weighted(int64_t rows, FewPlaces<K> values, const T* weights, const T* rescale,
                    const T* before, T* output) {
    if constexpr (kMayMultiplyPairs<E, K>)
      if (values_in_pairs_)
        return add_few_values_by_pairs<K>(rows, p_.head_dim_v, values, weights, words_, rescale,
                                          before, output);
    add_few_values<K>(rows, p_.head_dim_v, values, weights, rescale, before, output);
  }

  const Problem& p_;
  const bool values_in_pairs_;
  T* scores_;         // [kFewRows, kFewStep]
  const K** places_;  // [2 kFewKeys + kFewPlaces + kFewMostAhead], of a block
  FewPlaces<K> at_values_{};
  int64_t next_key_ = -1, next_keys_ = 0;
  T *marks_, *tile_weights_;     // [keys x lanes]; marks are of scores (repair/)
  K* zeros_;                     // [Dv]
  T* columns_;                   // [D, 2 W]
  T *scales_, *scaled_weights_;  // of int8: [keys], [kFewRows, kFewStep]
  Word<K>* words_;               // [kFewRows, kFewStep], weights
  KeyRows<K> keys_, values_;
};

}  // namespace qkv::QKV_ISA
