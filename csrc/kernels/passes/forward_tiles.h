// How the forward pass multiplies tiles of queries, a row in each lane, with one block of keys and
// values. The other way, for planes of few rows, is forward_few_rows.h.
#pragma once

#include "kernels/products/products.h"
#include "repair/nonfinite_keys.h"

namespace qkv::QKV_ISA {

// K is what keys and values are in memory: E, or int8, which becomes the compute type when a block
// is read.
template <class E, class K = E>
class ForwardTiles {
  using T = Compute<E>;
  using O = std::conditional_t<std::is_same_v<K, E>, E, T>;  // what is multiplied
  static_assert(std::is_same_v<QKV_ISA::Factor<O>, QKV_ISA::Factor<E>>);

 public:
  using Element = E;
  using Factor = QKV_ISA::Factor<E>;   // what a packed tile of queries consists of
  using Query = RightOperand<Factor>;  // such a tile
  static constexpr int64_t kKeyMultiple = kDepthMultiple<E>;  // where a tile may begin in a block
  // Whether add_values takes a null `rescale` for a tile whose output has not been written; else
  // that begins with zeros.
  static constexpr bool kOverwritesOutput = true;

  ForwardTiles(Arena& arena, const Problem& p)
      : p_(p),
        unit_(!arena.counting()),
        keys_(arena, copies_rows<O>(p, p.key), kKeyBlock, p.head_dim, Use::rows),
        values_(arena, copies_rows<O>(p, p.value), kKeyBlock, p.head_dim_v, Use::columns),
        output_(arena),
        can_be_in_rows_(multiplies_by_rows<E>(p.value, p.head_dim_v)) {
    if (!std::is_same_v<K, O>) {
      wide_keys_ = arena.take<T>(kKeyBlock * padded<T>(p.head_dim));
      wide_values_ = arena.take<T>(kKeyBlock * padded<T>(p.head_dim_v));
    }
    if (hides_any(p)) nonfinite_values_.emplace(arena, p.head_dim_v);
  }

  // How many keys each block has that `keys` keys are cut into.
  static int64_t block_keys(int64_t keys) { return key_step(keys); }
  // How many Factors a packed tile of queries has, and how many elements its output.
  static int64_t query_size(const Problem& p) { return kTileRows<T> * packed_size<E>(p.head_dim); }
  static int64_t output_size(const Problem& p) { return kTileRows<T> * padded<T>(p.head_dim_v); }
  using Reference = typename OutputSum<E>::Reference;
  static bool has_own_sum(const Problem& p) { return OutputSum<E>::has_own_sum(p); }

  Query pack(const Tile& tile, Factor* memory) { return pack_queries<E>(p_, tile, memory); }

  // Reads keys [key, key + keys) and their values, a block, which serves every tile before the next
  // one is read.
  void load_block(Plane plane, int64_t key, int64_t keys) {
    load(keys_, key_rows<K>(p_, plane), key, keys, wide_keys_);
    if (values_begin_keys(p_))
      values_.load(keys_, key, keys);
    else
      load(values_, value_rows<K>(p_, plane), key, keys, wide_values_);
    plane_ = plane, key_ = key, count_ = keys;
  }

  // scores [keys x lanes] = the scores of keys [key, key + keys), which are loaded, before any
  // option.
  void scores(const Tile& tile, int64_t key, int64_t keys, const Query& query, T* scores) const {
    multiply(keys_.rows(key, keys), query, whole_columns<Factor>(tile.rows),
             Sum<T>{scores, tile.step, Beta::zero, ahead_});
  }

  // Whether the output of a tile is summed as [rows x Dv] and not as [Dv x lanes]: where lanes have
  // no row. Such a product has the same sums, of the rows that there are alone, and nothing is to
  // be transposed. Of a tile whose lanes all have a row it is 1 % slower (AVX-512, Zen 5).
  bool is_in_rows(const Tile& tile) const { return can_be_in_rows_ && tile.rows < kTileRows<T>; }

  // Turns scores into weights.
  const OutputSum<E>& output_sum() const { return output_; }

  // output [Dv x lanes] = rescale [lanes] * before + V^T weights [keys x lanes], or, if rescale is
  // null, the product alone; transposed where is_in_rows.
  void add_values(const Tile& tile, int64_t key, int64_t keys, const T* weights, const T* rescale,
                  const T* before, T* output) const {
    add_product(tile, values_.columns(key, keys), keys, weights, rescale, before, output);
  }

  // What the products ask for; null: nothing.
  void set_ahead(Ahead* ahead) { ahead_ = ahead; }
  // About how often they ask for a tile and a block of `keys` keys.
  static int64_t times_of_asking(const Problem& p, int64_t keys) {
    return (keys + kProductRows - 1) / kProductRows +
           (p.head_dim_v + kProductRows - 1) / kProductRows;
  }

  // The next four only where pairs can be hidden.
  //
  // Returns whether all of the loaded values are finite. If not, it separates those that are not
  // from the others (repair/nonfinite_keys.h), for add_visible_values.
  bool separate_values() {
    if constexpr (std::is_same_v<K, O>)
      return nonfinite_values_->separate(value_rows<K>(p_, plane_), key_, count_);
    else
      return nonfinite_values_->separate(in_wide(wide_values_, key_, p_.head_dim_v), key_, count_);
  }
  // Whether one of these values, which separate_values has separated, is not finite and hidden from
  // a row.
  bool hides_nonfinite(const Tile& tile, int64_t key, int64_t keys, const T* weights) {
    return nonfinite_values_->hide(p_, tile, key, keys, weights);
  }
  // add_values without the hidden pairs. hides_nonfinite must have been called for the same keys
  // before.
  void add_visible_values(const Tile& tile, int64_t key, int64_t keys, const T* weights,
                          const T* rescale, const T* before, T* output) const {
    add_product(tile, nonfinite_values_->finite(key, keys), keys, weights, rescale, before, output);
    nonfinite_values_->add(tile, is_in_rows(tile), output);
  }
  // Whether values that are not finite may have got into output. One of them spoils all lanes of
  // its row alike, so it is enough to look at one vector of lanes.
  bool is_spoilt(const Tile& tile, const T* output) const {
    return is_in_rows(tile) ? !all_finite(output, p_.head_dim_v)
                            : !vectors_are_finite(output, p_.head_dim_v, tile.lanes);
  }

  // Writes the rows of factors [lanes] * output to rows begin, begin + 1, ... of `to`. The output
  // is not used again.
  template <class To>
  void write(const Tile& tile, const T* factors, T* output, const Rows<To>& to,
             int64_t begin) const {
    if (is_in_rows(tile)) return write_rows(tile, p_.head_dim_v, factors, output, to, begin);
    write_columns(tile, p_.head_dim_v, factors, output, to, begin);
  }

 private:
  // Reads rows [key, key + keys) into `operand`: from where they are, or, of int8, times their
  // scales from `wide`.
  static void load(KeyOperand<O>& operand, const KeyRows<K>& rows, int64_t key, int64_t keys,
                   T* wide) {
    if constexpr (std::is_same_v<K, O>) {
      operand.load(rows, key, keys);
    } else {
      rows.read(key, keys, wide);
      operand.load(in_wide(wide, key, rows.dim()), key, keys);
    }
  }
  static KeyRows<O> in_wide(const T* wide, int64_t key, int64_t dim) {
    return {wide, key, padded<T>(dim), dim};
  }

  void add_product(const Tile& tile, const LeftOperand<Factor>& values, int64_t keys,
                   const T* weights, const T* rescale, const T* before, T* output) const {
    const Query operand = output_.operand(tile, keys, values.depth, weights);
    if (is_in_rows(tile)) {
      if (rescale) scale_rows(tile, rescale, before, output);
      return multiply_by_rows(values, operand, tile.rows, output, rescale ? Beta::one : Beta::zero,
                              ahead_);
    }
    multiply(values, operand, whole_columns<Factor>(tile.rows),
             Sum<T>{output, tile.lanes, rescale ? Beta::lanes : Beta::zero, ahead_, rescale,
                    before - output});
  }
  // output [rows x Dv] = before * rescale [rows]. Most factors are 1, and all are powers of two but
  // for enormous scores (Reference): so this rounds no more than Beta::lanes does.
  void scale_rows(const Tile& tile, const T* rescale, const T* before, T* output) const {
    const int64_t dim = p_.head_dim_v;
    for (int r = 0; r < tile.rows; ++r, before += dim, output += dim)
      for (int64_t d = 0; (before != output || rescale[r] != 1) && d < dim; d += kLanes<T>)
        store(output + d, QKV_ISA::load(before + d) * rescale[r]);
  }

  const Problem& p_;
  ProductUnit unit_;
  Ahead* ahead_ = nullptr;
  KeyOperand<O> keys_, values_;
  T *wide_keys_ = nullptr, *wide_values_ = nullptr;  // [kKeyBlock, padded(D)], of int8
  Plane plane_{};
  int64_t key_ = 0, count_ = 0;  // the block that is loaded
  OutputSum<E> output_;
  bool can_be_in_rows_;
  std::optional<NonfiniteKeys<O, Infinities::kept>> nonfinite_values_;
};

}  // namespace qkv::QKV_ISA
