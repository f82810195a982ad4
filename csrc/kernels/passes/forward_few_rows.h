// How the forward pass multiplies planes of few rows (products/few_rows.h).
//
// Their speed is that of memory, so it is kept busy: while one block of keys is multiplied, its
// values are prefetched, and while the values are multiplied, the next keys are.
#pragma once

#include "kernels/operands/key_rows.h"
#include "kernels/operands/tile.h"
#include "kernels/products/few_rows.h"
#include "kernels/products/few_values.h"
#include "kernels/score/few_softmax.h"
#include "repair/counts.h"
#include "repair/marks.h"

namespace qkv::QKV_ISA {

// The bytes of a chunk of keys or values, of which one is multiplied while the next one is fetched:
// two of them, the queries, the scores and the output have to fit into a first-level cache of 32
// KiB. With 16 KiB, f32 and bf16 from memory took up to 1.2 times as long on a Zen 3.
constexpr int64_t kFewBytes = int64_t(8) << 10;

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
  using Query = const T*;  // [rows, D], times scale
  using Reference = QKV_ISA::Reference<T>;  // what weights are relative to
  static constexpr int64_t kKeyMultiple = 1;

  ForwardFewRows(Arena& arena, const Problem& p)
      : p_(p),
        scores_(arena.take<T>(kFewScores * (kHasRests<K> ? 2 : 1))),
        marks_(hides_any(p) ? arena.take<T>(kFewKeys * kTileRows<T>) : nullptr),
        tile_weights_(hides_any(p) ? arena.take<T>(kFewKeys * kTileRows<T>) : nullptr),
        scales_(kHasScales ? arena.take<T>(kFewStep) : nullptr),
        scaled_weights_(kHasScales ? arena.take<T>(kFewScores) : nullptr) {
    std::fill_n(ones_, kFewRows, T(1));
  }

  static int64_t block_keys(int64_t) { return kFewKeys; }
  static int64_t query_size(const Problem& p) { return kTileRows<T> * p.head_dim; }
  static int64_t output_size(const Problem& p) { return kTileRows<T> * p.head_dim_v; }
  static bool has_own_sum(const Problem&) { return false; }

  Query pack(const Tile& tile, T* memory) const {
    pack_few_queries<E, K>(p_, tile.batch, tile.kv_head, tile.row, tile.rows, memory);
    return memory;
  }

  // Nothing is copied: products read the user's memory.
  void load_block(int64_t batch, int64_t kv_head, int64_t, int64_t) {
    keys_ = key_rows<K>(p_, batch, kv_head);
    values_ = value_rows<K>(p_, batch, kv_head);
  }

  // Returns scores [rows x keys] of keys [key, key + keys), before any option.
  T* scores(const Tile& tile, int64_t key, int64_t keys, Query query) const {
    for_each_chunk(tile, p_.head_dim, key, keys, [&](int64_t begin, int64_t count, bool is_last) {
      const KeyRows<K>& next = is_last ? values_ : keys_;
      const int64_t ahead = is_last ? key : begin + count;
      keys_.for_each_run(begin, count, [&](int64_t j, int64_t n) {
        const K* const fetched = next.at(std::min(ahead + (j - begin), p_.seqlen_k - 1));
        few_scores<K>(tile.rows, p_.head_dim, {keys_.at(j), keys_.row(), n, fetched, next.row()},
                      query, scores_ + (j - key));
      });
    });
    if constexpr (kHasScales) times_scales<true>(tile, keys_, key, keys, scores_, scores_);
    return scores_;
  }

  void add_values(const Tile& tile, int64_t key, int64_t keys, const T* weights, const T* rescale,
                  const T* before, T* output) const {
    weights = of_elements(tile, key, keys, weights);
    for_each_chunk(tile, p_.head_dim_v, key, keys, [&](int64_t begin, int64_t count, bool is_last) {
      const KeyRows<K>& next = is_last ? keys_ : values_;
      typename FewValues<K>::Run runs[kFewKeys];
      auto* end = runs;
      values_.for_each_run(begin, count,
                           [&](int64_t j, int64_t n) { *end++ = {values_.at(j), n, j - begin}; });
      const auto fetch = [&](int64_t panel, int64_t panels) QKV_INLINE_LAMBDA {
        const int64_t first = begin + count + count * panel / panels;
        const int64_t last = begin + count + count * (panel + 1) / panels;
        next.for_each_run(first, std::min(last, p_.seqlen_k) - first,
                          [&](int64_t j, int64_t n) QKV_INLINE_LAMBDA {
                            fetch_rows(next.at(j), next.row(), n, next.dim());
                          });
      };
      add_few_values<K>(tile.rows, p_.head_dim_v, {runs, end, values_.row()},
                        weights + (begin - key), begin == key ? rescale : ones_,
                        begin == key ? before : output, output, fetch);
    });
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
    for_each_chunk(tile, dim, key, keys, [&](int64_t begin, int64_t count, bool) {
      const T* const first = begin == key ? before : output;
      const T* const factors = begin == key ? rescale : ones_;
      for (int r = 0; r < tile.rows; ++r) {
        typename FewValues<K>::Run runs[kFewKeys];
        auto* end = runs;
        for (int64_t j = begin; j < begin + count; ++j)
          if (marks_[(j - key) * tile.step + r] != 0) *end++ = {values_.at(j), 1, j - begin};
        add_few_values<K>(1, dim, {runs, end, values_.row()},
                          weights + r * kFewStep + (begin - key), factors + r, first + r * dim,
                          output + r * dim, [](int64_t, int64_t) {});
      }
    });
  }

  // Values are read where they are, so those that are not finite cannot be separated. Instead, once
  // there were some, all values count as not finite, and hidden pairs are left out of all products.
  static bool separate_values() { return false; }
  bool is_spoilt(const Tile&, const T* output) const { return !all_finite(output, p_.head_dim_v); }

  const T* output_rows(const Tile& tile, const T* factors, T* output, T*) const {
    constexpr int W = kLanes<T>;
    const int64_t dim = p_.head_dim_v;
    for (int r = 0; r < tile.rows; ++r) {
      T* const row = output + r * dim;
      for (int64_t d = 0; d < dim; d += W) store(row + d, load(row + d) * factors[r]);
      for (int64_t d = 0; d + 2 * W <= dim; d += 2 * W) from_parts<K>(row + d);
    }
    return output;
  }

 private:
  // to [rows x keys] = from times the scales of rows [key, key + keys) of `rows`. Where `from` are
  // sums, their rests are, too.
  template <bool kSums>
  void times_scales(const Tile& tile, const KeyRows<K>& rows, int64_t key, int64_t keys,
                    const T* from, T* to) const {
    const int64_t end = padded<T>(keys);
    rows.for_each_run(key, keys, [&](int64_t first, int64_t count) {
      const RowPlaces<float>& scales = rows.scales();
      const float *from = scales.at(first),
                  *ahead = scales.at(std::min(first + kFewKeys, p_.seqlen_k - 1));
      for (int64_t j = first - key; j < first - key + count; ++j) {
        scales_[j] = *from;
        __builtin_prefetch(ahead);
        from += scales.row, ahead += scales.row;
      }
    });
    for (int64_t j = keys; j < end; ++j) scales_[j] = 0;
    for (int r = 0; r < tile.rows; ++r)
      for (int64_t j = 0; j < end; j += kLanes<T>) {
        const int64_t at = r * kFewStep + j;
        const Vec<T> scale = load(scales_ + j);
        if constexpr (kSums)
          store(to + at, load(from + at) * scale + load(from + kFewScores + at) * scale);
        else
          store(to + at, load(from + at) * scale);
      }
  }
  // What the elements of values are multiplied by: weights, times the scales of int8.
  const T* of_elements(const Tile& tile, int64_t key, int64_t keys, const T* weights) const {
    if constexpr (kHasScales) {
      times_scales<false>(tile, values_, key, keys, weights, scaled_weights_);
      return scaled_weights_;
    } else {
      return weights;
    }
  }

  // Calls f(begin, count, is_last) for keys or values [key, key + keys) in chunks of about
  // kFewBytes; of more rows for more queries, whose sums are read and written once a chunk. While
  // one is worked off the next one is fetched: after the keys of a block its values, and after
  // these the next keys.
  template <class F>
  QKV_INLINE void for_each_chunk(const Tile& tile, int64_t dim, int64_t key, int64_t keys,
                                 const F& f) const {
    const int64_t bytes = std::max<int64_t>(1, dim * int64_t(sizeof(K)));
    const int64_t step = std::max({int64_t(16), int64_t(4 * tile.rows), kFewBytes / bytes});
    for (int64_t begin = key; begin < key + keys; begin += step) {
      const int64_t count = std::min(step, key + keys - begin);
      f(begin, count, begin + count == key + keys);
    }
  }

  const Problem& p_;
  T* scores_;                    // [kFewRows, kFewStep]
  T* marks_;                     // [keys x lanes], of scores (repair/)
  T* tile_weights_;              // [keys x lanes]
  T *scales_, *scaled_weights_;  // of int8: [keys], [kFewRows, kFewStep]
  T ones_[kFewRows];
  KeyRows<K> keys_, values_;
};

}  // namespace qkv::QKV_ISA
