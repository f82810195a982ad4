// The operands and the scratch memory of the pass for forward-mode derivatives (jvp.h).
#pragma once

#include "kernels/products/few_pairs.h"
#include "kernels/products/products.h"
#include "kernels/score/dropout.h"
#include "kernels/score/score.h"
#include "repair/counts.h"
#include "repair/nonfinite_keys.h"

namespace qkv::QKV_ISA {

// What a tile of queries carries from one block of keys to the next.
template <class T>
struct JvpState {
  Tile tile;
  T *query_memory, *query_jvp_memory;
  RightOperand<T> query, query_jvp;  // packed there, times scale
  T *output, *output_jvp;            // [padded(Dv) x lanes], not yet divided by sum
  T* max;                            // [lanes]
  T *sum, *sum_jvp;                  // [lanes] of weights, and of weights times changes of scores
  bool is_finite;                    // whether its rows of query and their directions are finite
};

// A tensor [B..., Hkv, S, dim] of the problem, key or value, or the direction of one of them; or
// nothing.
template <class E>
class JvpKeys {
  using T = Compute<E>;

 public:
  JvpKeys(Arena& arena, const Problem& p, const Input& input, int64_t dim, Use use)
      : p_(p),
        input_(input),
        dim_(dim),
        operand_(arena, copies_rows<E>(p, input), kKeyBlock, dim, use) {}

  explicit operator bool() const { return input_.data != nullptr; }

  // Reads keys [key, key + keys), a block.
  void load(Plane plane, int64_t key, int64_t keys) {
    if (!*this) return;
    block_ = key, block_keys_ = keys;
    source_ = KeyRows<E>(p_, plane, dim_, input_);
    operand_.load(source_, key, keys);
    loaded_.load(operand_.natural(), key, keys, dim_);
  }
  const KeyRows<E>& source() const { return source_; }
  bool is_finite() { return !*this || loaded_.are_finite(block_, block_ + block_keys_); }

  LeftOperand<T> rows(int64_t key, int64_t keys) const { return operand_.rows(key, keys); }

  // sum [dim x lanes] = beta * sum + the transposed keys times a tile [keys x lanes]. With
  // `nonfinite`, numbers that are not finite are left out of hidden pairs (repair/); weights [keys
  // x lanes] then tell how they count in others.
  template <class Nonfinite>
  void add_columns(const Tile& tile, int64_t key, int64_t keys, const T* from, const Sum<T>& sum,
                   Nonfinite* nonfinite, const T* weights) const {
    const bool repairs = nonfinite && !nonfinite->separate(source_, block_, block_keys_) &&
                         nonfinite->hide(p_, tile, key, keys, weights);
    multiply(repairs ? nonfinite->finite(key, keys) : operand_.columns(key, keys),
             {from, tile.step}, tile.lanes, sum);
    if (repairs) nonfinite->add(tile, false, sum.data);
  }

 private:
  const Problem& p_;
  const Input input_;
  int64_t dim_;
  KeyOperand<E> operand_;
  KeyRows<E> source_;
  LoadedKeys<T> loaded_;
  int64_t block_ = 0, block_keys_ = 0;
};

template <class E>
struct JvpScratch {
  using T = Compute<E>;

  RowOperand<E> query_rows;
  JvpKeys<E> keys, keys_jvp, values, values_jvp;
  // Where pairs can be hidden. What is not finite counts as NaN in derivatives: an infinite value
  // is multiplied by changes of scores, which have any sign.
  std::optional<NonfiniteKeys<E, Infinities::kept>> nonfinite_values;
  std::optional<NonfiniteKeys<E, Infinities::as_nan>> nan_values, nan_values_jvp;
  T *scores, *scores_jvp;  // [kKeyBlock, kTileRows]
  T* marks;                // the same, see repair/marks.h; or null
  ScoreTiles<T> kept;      // the same, by the options of the scores
  T* rescale;              // [kTileRows]
  T* rows;                 // [kTileRows, padded(Dv)]
  T* few_query;            // as BackwardOperands has it, where the caller has the output; else null
  Dropout<T> dropout;
  JvpState<T>* tiles;
  bool with_scores, with_output;  // whether scores change; whether the output is made

  JvpScratch(Arena& arena, const Problem& p, const JvpArgs& a, int64_t rows_count)
      : query_rows(arena, kTileRows<T>, p.head_dim),
        keys(arena, p, p.key, p.head_dim, Use::rows),
        keys_jvp(arena, p, a.key, p.head_dim, Use::rows),
        values(arena, p, p.value, p.head_dim_v, Use::columns),
        values_jvp(arena, p, a.value, p.head_dim_v, Use::columns),
        scores(arena.take<T>(kTileRows<T> * kKeyBlock)),
        scores_jvp(arena.take<T>(kTileRows<T> * kKeyBlock)),
        marks(hides_any(p) ? arena.take<T>(kTileRows<T> * kKeyBlock) : nullptr),
        kept(take_score_tiles<T>(arena, p, kTileRows<T> * kKeyBlock)),
        rescale(arena.take<T>(kTileRows<T>)),
        rows(arena.take<T>(kTileRows<T> * padded<T>(p.head_dim_v))),
        few_query(a.output.data && has_few_scores<E>(p) ? arena.take<T>(few_query_size<E>(p))
                                                        : nullptr),
        dropout(p),
        with_scores(moves_scores(a)),
        with_output(!a.output.data) {
    if (hides_any(p)) {
      nonfinite_values.emplace(arena, p.head_dim_v);
      nan_values.emplace(arena, p.head_dim_v);
      nan_values_jvp.emplace(arena, p.head_dim_v);
    }
    take_tiles(arena, p, (rows_count + kTileRows<T> - 1) / kTileRows<T>);
  }

  // Reads keys [key, key + keys), a block, and what belongs to them.
  void load_block(Plane plane, int64_t key, int64_t count) {
    for (JvpKeys<E>* of : {&keys, &keys_jvp, &values, &values_jvp}) of->load(plane, key, count);
  }
  // Whether that block is finite, with its values and all directions.
  bool is_block_finite() {
    return keys.is_finite() && keys_jvp.is_finite() && values.is_finite() && values_jvp.is_finite();
  }

 private:
  void take_tiles(Arena& arena, const Problem& p, int64_t count) {
    using State = JvpState<T>;
    tiles = arena.take<State>(count);
    for (int64_t t = 0; t < count; ++t) {
      State state{};
      const auto take = [&](int64_t size, auto... members) {
        ((state.*members = arena.take<T>(kTileRows<T> * size)), ...);
      };
      take(padded<T>(p.head_dim), &State::query_memory, &State::query_jvp_memory);
      take(padded<T>(p.head_dim_v), &State::output, &State::output_jvp);
      take(1, &State::max, &State::sum, &State::sum_jvp);
      if (!arena.counting()) tiles[t] = state;
    }
  }
};

}  // namespace qkv::QKV_ISA
