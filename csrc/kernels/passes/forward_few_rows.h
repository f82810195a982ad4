// How the forward pass multiplies planes of few rows (products/few_rows.h).
//
// Their speed is that of memory, so it is kept busy: while one block of keys is multiplied, its
// values are prefetched, and while the values are multiplied, the next keys are.
#pragma once

#include "kernels/products/few_columns.h"
#include "kernels/products/few_rows.h"
#include "kernels/products/few_scales.h"
#include "kernels/products/few_values.h"
#include "kernels/score/few_softmax.h"
#include "repair/counts.h"
#include "repair/marks.h"

namespace qkv::QKV_ISA {

// The most bytes of a chunk of keys or values, of which one is multiplied while the next one is
// fetched: two of them, the queries, the scores and the output have to fit into a first-level cache
// of 32 KiB.
constexpr int64_t kFewBytes = int64_t(12) << 10;

// The counterpart of ForwardTiles, whose functions are described there, but for block_keys and
// scores. Output is [rows, Dv], and weights are [rows x keys] (products/few_rows.h).
// K is what keys and values are in memory: E, or int8, whose scales multiply scores and weights.
template <class E, class K = E>
class ForwardFewRows {
  using T = Compute<E>;
  static constexpr bool kHasScales = !std::is_same_v<K, E>;

 public:
  using Element = E;
  using Factor = T;
  using Query = const T*;                   // [rows, D], times scale
  using Reference = QKV_ISA::Reference<T>;  // what weights are relative to
  static constexpr int64_t kKeyMultiple = 1;
  static constexpr bool kOverwritesOutput = false;

  ForwardFewRows(Arena& arena, const Problem& p)
      : p_(p),
        scores_(arena.take<T>(kFewScores * (kHasRests<K> ? 2 : 1))),
        key_at_(arena.take<const K*>(kFewStep)),
        value_at_(arena.take<const K*>(kFewStep)),
        next_at_(arena.take<const K*>(kFewStep)),
        marks_(hides_any(p) ? arena.take<T>(kFewKeys * kTileRows<T>) : nullptr),
        tile_weights_(hides_any(p) ? arena.take<T>(kFewKeys * kTileRows<T>) : nullptr),
        columns_(kFixedBits ? arena.take<T>(2 * kLanes<T> * p.head_dim) : nullptr),
        scales_(kHasScales ? arena.take<T>(kFewStep) : nullptr),
        scaled_weights_(kHasScales ? arena.take<T>(kFewScores) : nullptr) {
    std::fill_n(ones_, kFewRows, T(1));
  }

  static int64_t block_keys(int64_t) { return kFewKeys; }
  static int64_t query_size(const Problem& p) { return kTileRows<T> * p.head_dim; }
  static int64_t output_size(const Problem& p) { return kTileRows<T> * p.head_dim_v; }
  static bool has_own_sum(const Problem&) { return false; }

  Query pack(const Tile& tile, T* memory) const {
    (kFixedBits ? pack_few_rows<E> : pack_few_queries<E, K, T>)(p_, tile.plane, tile.row, tile.rows,
                                                                memory);
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
    if (key != next_key_ || keys > next_keys_) few_places(keys_, key, keys, key_at_);
    few_places(values_, key, keys, value_at_);
    if constexpr (kFixedBits && !kHasScales) {
      FewAhead<K> ahead = to_fetch({value_at_, keys}, keys, values_);
      few_scores_by_columns<K>(tile.rows, p_.head_dim, {key_at_, keys}, query, columns_, scores_,
                               ahead);
      return scores_;
    }
    for_each_chunk(p_.head_dim, keys, [&](int64_t begin, int64_t count, bool is_last) {
      const K* const* const rows = key_at_ + begin;
      const FewPlaces<K> next = is_last ? FewPlaces<K>{value_at_, count}
                                        : FewPlaces<K>{rows + count, keys - begin - count};
      FewAhead<K> ahead = to_fetch(next, count, is_last ? values_ : keys_);
      few_scores<K>(tile.rows, p_.head_dim, {rows, count}, query, scores_ + begin, ahead);
    });
    if constexpr (kHasScales)
      times_scales<true>(tile.rows, keys_, key, keys, p_.seqlen_k, scales_, scores_, scores_);
    return scores_;
  }

  void add_values(const Tile& tile, int64_t key, int64_t keys, const T* weights, const T* rescale,
                  const T* before, T* output) {
    weights = of_elements(tile, key, keys, weights);
    next_key_ = key + keys, next_keys_ = std::min(kFewKeys, p_.seqlen_k - next_key_);
    few_places(keys_, next_key_, next_keys_, next_at_);
    for_each_chunk(p_.head_dim_v, keys, [&](int64_t begin, int64_t count, bool is_last) {
      const K* const* const rows = value_at_ + begin;
      const FewPlaces<K> next = is_last ? FewPlaces<K>{next_at_, next_keys_}
                                        : FewPlaces<K>{rows + count, keys - begin - count};
      FewAhead<K> ahead = to_fetch(next, count, is_last ? keys_ : values_);
      add_few_values<K>(tile.rows, p_.head_dim_v, {rows, count}, weights + begin,
                        begin == 0 ? rescale : ones_, begin == 0 ? before : output, output, ahead);
    });
    std::swap(key_at_, next_at_);
  }

  // Hidden pairs are left out of the sums, which otherwise are those of add_values, to the last
  // bit: 0 times a finite value changes none.
  bool hides_nonfinite(const Tile& tile, int64_t key, int64_t keys, const T* weights) {
    few_to_tile(tile, keys, weights, tile_weights_);
    return mark_pairs(p_, tile, key, keys, tile_weights_, tile.step, marks_);
  }
  void add_visible_values(const Tile& tile, int64_t key, int64_t keys, const T* weights,
                          const T* rescale, const T* before, T* output) const {
    const int64_t dim = p_.head_dim_v;
    weights = of_elements(tile, key, keys, weights);
    for_each_chunk(dim, keys, [&](int64_t begin, int64_t count, bool) {
      const T* const first = begin == 0 ? before : output;
      const T* const factors = begin == 0 ? rescale : ones_;
      for (int r = 0; r < tile.rows; ++r) {
        const K* seen[kFewKeys];
        T seen_weights[kFewKeys];
        int64_t n = 0;
        FewAhead<K> nothing{};
        for (int64_t j = begin; j < begin + count; ++j)
          if (marks_[j * tile.step + r] != 0)
            seen[n] = value_at_[j], seen_weights[n++] = weights[r * kFewStep + j];
        add_few_values<K>(1, dim, {seen, n}, seen_weights, factors + r, first + r * dim,
                          output + r * dim, nothing);
      }
    });
  }

  // Values are read where they are, so those that are not finite cannot be separated. Instead, once
  // there were some, all values count as not finite, and hidden pairs are left out of all products.
  static bool separate_values() { return false; }
  bool is_spoilt(const Tile&, const T* output) const { return !all_finite(output, p_.head_dim_v); }

  template <class To>
  void write(const Tile& tile, const T* factors, T* output, const Rows<To>& to,
             int64_t begin) const {
    constexpr int W = kLanes<T>;
    const int64_t dim = p_.head_dim_v;
    for (int r = 0; r < tile.rows; ++r) {
      T* const row = output + r * dim;
      for (int64_t d = 0; d < dim; d += W) store(row + d, load(row + d) * factors[r]);
      for (int64_t d = 0; d + 2 * W <= dim; d += 2 * W) from_parts<K>(row + d);
      store_row(dim, to[begin + r], to.col, [&](auto at) QKV_INLINE_LAMBDA { return at(row); });
    }
  }

 private:
  // What the elements of values are multiplied by: weights, times the scales of int8.
  const T* of_elements(const Tile& tile, int64_t key, int64_t keys, const T* weights) const {
    if constexpr (kHasScales) {
      times_scales<false>(tile.rows, values_, key, keys, p_.seqlen_k, scales_, weights,
                          scaled_weights_);
      return scaled_weights_;
    } else {
      return weights;
    }
  }

  // What is fetched while `count` rows are multiplied: as many of the next ones.
  static FewAhead<K> to_fetch(FewPlaces<K> next, int64_t count, const KeyRows<K>& rows) {
    return {{next.rows, std::max<int64_t>(0, std::min(count, next.count))}, rows.dim()};
  }

  // Calls f(begin, count, is_last) for keys or values [begin, begin + count) of a block, in chunks
  // of up to kFewBytes, but no fewer than a quarter of a full block, since the sums of values are
  // read and written once a chunk. While one is worked off the next one is fetched: after the keys
  // of a block its values, and after these the next keys. Chunks of a full block are equal: after a
  // short one, too little would have been fetched (1.3 times the time from memory, on a Zen 3).
  template <class F>
  QKV_INLINE void for_each_chunk(int64_t dim, int64_t keys, const F& f) const {
    int64_t step = kFewKeys;  // which is one chain of additions where bits are fixed
    while (!kFixedBits && step > kFewKeys / 4 && step * dim * int64_t(sizeof(K)) > kFewBytes)
      step /= 2;
    for (int64_t begin = 0; begin < keys; begin += step) {
      const int64_t count = std::min(step, keys - begin);
      f(begin, count, begin + count == keys);
    }
  }

  const Problem& p_;
  T* scores_;  // [kFewRows, kFewStep]
  // [kFewStep], where rows begin: those of the block, and its next keys.
  const K **key_at_, **value_at_, **next_at_;
  int64_t next_key_ = -1, next_keys_ = 0;
  T* marks_;                     // [keys x lanes], of scores (repair/)
  T* tile_weights_;              // [keys x lanes]
  T* columns_;                   // [D, 2 W]
  T *scales_, *scaled_weights_;  // of int8: [keys], [kFewRows, kFewStep]
  T ones_[kFewRows];
  KeyRows<K> keys_, values_;
};

}  // namespace qkv::QKV_ISA
