// How the forward pass multiplies planes of few rows (products/few_rows.h).
//
// Their speed is that of memory, so it is kept busy: while one block of keys is multiplied, its
// values are prefetched, and while the values are multiplied, the next keys are.
#pragma once

#include "kernels/operands/key_rows.h"
#include "kernels/operands/tile.h"
#include "kernels/products/few_rows.h"
#include "repair/counts.h"
#include "repair/marks.h"

namespace qkv::QKV_ISA {

// How many keys a block has. Its values are prefetched into the first-level cache, so they have to
// fit. 16 and 64 keys were slower, and so was prefetching into the second level.
constexpr int64_t kFewKeys = 32;

// The counterpart of ForwardTiles, whose functions are described there. Output is [rows, Dv].
template <class E>
class ForwardFewRows {
  using T = Compute<E>;

 public:
  using Element = E;
  using Factor = T;
  using Query = const T*;  // [rows, D], times scale
  static constexpr int64_t kKeyMultiple = 1;

  ForwardFewRows(Arena& arena, const Problem& p)
      : p_(p), marks_(hides_any(p) ? arena.take<T>(kFewKeys * kTileRows<T>) : nullptr) {}

  static int64_t block_keys(int64_t) { return kFewKeys; }
  static int64_t query_size(const Problem& p) { return kTileRows<T> * p.head_dim; }
  static int64_t output_size(const Problem& p) { return kTileRows<T> * p.head_dim_v; }

  Query pack(const Tile& tile, T* memory) const {
    pack_few_queries<E>(p_, tile.batch, tile.kv_head, tile.row, tile.rows, memory);
    return memory;
  }

  // Nothing is copied: products read the user's memory.
  void load_block(int64_t batch, int64_t kv_head, int64_t, int64_t) {
    keys_ = key_rows<E>(p_, batch, kv_head);
    values_ = value_rows<E>(p_, batch, kv_head);
  }

  void scores(const Tile& tile, int64_t key, int64_t keys, Query query, T* scores) const {
    keys_.for_each_run(key, keys, [&](int64_t j, int64_t count) {
      few_scores<E>(tile, p_.head_dim, count, keys_.at(j), keys_.row(), query,
                    scores + (j - key) * tile.step,
                    Ahead(values_.at(j), values_.row(), p_.head_dim_v));
    });
  }

  void add_values(const Tile& tile, int64_t key, int64_t keys, const T* weights, const T* rescale,
                  const T* before, T* output) const {
    const int64_t dim = p_.head_dim_v;
    rescale_rows(tile, rescale, before, output);
    values_.for_each_run(key, keys, [&](int64_t j, int64_t count) {
      add_few_values<E>(
          tile.rows, dim, count, values_.at(j), values_.row(), weights + (j - key) * tile.step,
          tile.step, output,
          j + keys < p_.seqlen_k ? Ahead(keys_.at(j + keys), keys_.row(), p_.head_dim) : Ahead());
    });
  }

  // Hidden pairs are left out of the sums: runs of keys that all rows see are multiplied for all
  // rows together, other keys row by row.
  bool hides_nonfinite(const Tile& tile, int64_t key, int64_t keys, const T* weights) {
    return mark_pairs(p_, tile, key, keys, weights, tile.step, marks_);
  }
  void add_visible_values(const Tile& tile, int64_t key, int64_t keys, const T* weights,
                          const T* rescale, const T* before, T* output) const {
    rescale_rows(tile, rescale, before, output);
    const auto all_see = [&](int64_t j, int64_t row, int64_t rows) {
      bool all = true;
      for (int64_t r = row; r < row + rows; ++r) all &= marks_[(j - key) * tile.step + r] != 0;
      return all;
    };
    // Calls add for the runs of keys in [first, last) that all of these rows see, and others for
    // the runs between them.
    const auto sort_runs = [&](int64_t first, int64_t last, int64_t row, int64_t rows,
                               const auto& add, const auto& others) {
      for (int64_t j = first, end; j < last; j = end) {
        const bool seen = all_see(j, row, rows);
        for (end = j + 1; end < last && all_see(end, row, rows) == seen;) ++end;
        seen ? add(row, rows, j, end) : others(j, end);
      }
    };
    const auto add = [&](int64_t row, int64_t rows, int64_t j, int64_t end) {
      add_few_values<E>(rows, p_.head_dim_v, end - j, values_.at(j), values_.row(),
                        weights + (j - key) * tile.step + row, tile.step,
                        output + row * p_.head_dim_v, {});
    };
    values_.for_each_run(key, keys, [&](int64_t first, int64_t count) {
      sort_runs(first, first + count, 0, tile.rows, add, [&](int64_t begin, int64_t end) {
        for (int r = 0; r < tile.rows; ++r)
          sort_runs(begin, end, r, 1, add, [](int64_t, int64_t) {});
      });
    });
  }

  // Values are read where they are, so those that are not finite cannot be separated. Instead, once
  // there were some, all values count as not finite, and hidden pairs are left out of all products.
  static bool separate_values() { return false; }
  bool is_spoilt(const Tile&, const T* output) const { return !all_finite(output, p_.head_dim_v); }

  const T* output_rows(const Tile& tile, const T* factors, T* output, T*) const {
    for (int r = 0; r < tile.rows; ++r)
      for (int64_t d = 0; d < p_.head_dim_v; d += kLanes<T>) {
        T* at = output + r * p_.head_dim_v + d;
        store(at, load(at) * factors[r]);
      }
    return output;
  }

 private:
  void rescale_rows(const Tile& tile, const T* rescale, const T* before, T* output) const {
    const int64_t dim = p_.head_dim_v;
    for (int r = 0; r < tile.rows; ++r)
      for (int64_t d = 0; d < dim; d += kLanes<T>)
        store(output + r * dim + d, load(before + r * dim + d) * rescale[r]);
  }

  const Problem& p_;
  T* marks_;  // of scores (repair/)
  KeyRows<E> keys_, values_;
};

}  // namespace qkv::QKV_ISA
