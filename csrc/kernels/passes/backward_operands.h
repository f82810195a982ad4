// What the backward pass multiplies: a block of rows of query and grad_output, and the keys and
// values of an item.
#pragma once

#include "common/row_sums.h"
#include "kernels/products/few_pairs.h"
#include "kernels/products/products.h"
#include "repair/nonfinite_keys.h"
#include "repair/nonfinite_rows.h"

namespace qkv::QKV_ISA {

// One tile of the block of rows, its operands and its sum.
template <class E>
struct BackwardTile {
  Tile tile;
  int64_t lane;                         // its first row in the block
  RightOperand<Factor<E>> query;        // Q^T [D x lanes], times scale
  RightOperand<Factor<E>> grad_output;  // dO^T [Dv x lanes], times dropout's factor; null: none
  Compute<E>* grad_query;               // the sum dQ^T [padded(D) x lanes]
  bool in_rows;                         // or that of dQ, [rows x D] (multiply_by_rows)

  int64_t sum_size(int64_t dim) const { return dim * (in_rows ? tile.rows : tile.lanes); }
};

// The keys of an item, or the directions of keys: rows as operand of scores, and columns of the sum
// dQ^T, from which hidden pairs are left out where keys are not finite (repair/).
template <class E>
class GradKeys {
  using T = Compute<E>;

 public:
  // input: key, or its direction.
  GradKeys(Arena& arena, const Problem& p, const Input& input, int64_t count)
      : dim_(p.head_dim), operand_(arena, copies_rows<E>(p, input), count, p.head_dim, Use::both) {
    if (hides_any(p)) nonfinite_.emplace(arena, p.head_dim);
  }

  void load(const KeyRows<E>& rows, int64_t key, int64_t count) {
    source_ = rows;
    operand_.load(rows, key, count);
    loaded_.load(operand_.natural(), key, count, dim_);
  }
  const KeyRows<E>& source() const { return source_; }
  LeftOperand<Factor<E>> rows(int64_t key, int64_t keys) const { return operand_.rows(key, keys); }

  // Whether one of keys [key, key + count), which are loaded, is not finite and hidden from a row.
  bool hides_nonfinite(const Problem& p, const Tile& tile, int64_t key, int64_t count,
                       const T* weights) {
    const int64_t touched = touched_keys(count, kDepthMultiple<E>);
    if (loaded_.are_finite(key, key + touched)) return false;
    nonfinite_->separate(source_, key, count);
    return nonfinite_->hide(p, tile, key, count, weights) || touched != count;
  }
  // t.grad_query += the transposed keys [key, key + keys) times grad_scores [keys x lanes].
  // `repairs` is what hides_nonfinite has said of them.
  void add_grad_query(const BackwardTile<E>& t, int64_t key, int64_t keys, const TileAsB<E>& as_b,
                      const T* grad_scores, bool with_rest, bool repairs) const {
    add_over_keys(t.tile, repairs ? nonfinite_->finite(key, keys) : operand_.columns(key, keys),
                  keys, as_b, grad_scores, with_rest, t.in_rows, t.grad_query);
    if (repairs) nonfinite_->add(t.tile, t.in_rows, t.grad_query);
  }

 private:
  int64_t dim_;
  KeyOperand<E> operand_;
  KeyRows<E> source_;
  LoadedKeys<Natural<E>> loaded_;
  std::optional<NonfiniteKeys<E, Infinities::as_nan>> nonfinite_;  // where pairs can be hidden
};

// Up to so many keys it shows that rows of f32 and f64 are copied: of 16 queries and keys of 32
// elements that takes a twentieth of the pass, of 64 of 64 a thirtieth, and of 197 a hundredth
// (Xeon with AVX-512).
constexpr int64_t kReferKeys = 256;

template <class E>
struct BackwardOperands {
  using T = Compute<E>;
  using F = Factor<E>;

  ProductUnit unit;
  // Few keys: sums over rows, of dK and dV, are made of short chains of additions, and what the
  // weights of a row add up to is made of its tile.
  bool has_few_keys;
  RowOperand<E> query, grad_output;  // of the block; grad_output times dropout's factor
  bool has_grad_output = false;
  // Whether the rows see at most an eighth of the keys. Such rows have the largest weights, which
  // decide how accurate gradients are, and they cost little. So what rounding takes off a tile of
  // theirs is multiplied, too.
  bool sees_few = false;
  GradKeys<E> keys;  // of the item, as are the values
  // Whether dQ is summed by rows, which are then not transposed on their way from and to memory.
  bool in_rows;
  KeyOperand<E> values;
  TileAsA<E> as_a;
  TileAsB<E> as_b;
  F *query_t, *grad_output_t;  // memory for the operands of tiles
  T* grad_query_t;             // and for their sums
  Ahead* ahead = nullptr;      // what products ask for (backward_ahead.h)
  T* few_query;                // [rows, D] times scale, where the plane has few rows; else null

  // Where pairs can be hidden.
  std::optional<NonfiniteRows<E, Infinities::as_nan>> nonfinite_query;
  std::optional<NonfiniteRows<E, Infinities::kept>> nonfinite_grad_output;

  BackwardOperands(Arena& arena, const Problem& p, int64_t key_count)
      : unit(!arena.counting()),
        has_few_keys(qkv::has_few_keys<E>(p)),
        query(arena, kGradRows, p.head_dim),
        grad_output(arena, kGradRows, p.head_dim_v),
        keys(arena, p, p.key, key_count),
        in_rows(multiplies_by_rows<E>(p.key, p.head_dim)),
        values(arena, copies_rows<E>(p, p.value), key_count, p.head_dim_v, Use::rows),
        as_a(arena),
        as_b(arena),
        query_t(arena.take<F>(kGradRows * packed_size<E>(p.head_dim))),
        grad_output_t(arena.take<F>(kGradRows * packed_size<E>(p.head_dim_v))),
        grad_query_t(arena.take<T>(kGradRows * padded<T>(p.head_dim))),
        few_query(has_few_scores<E>(p) ? arena.take<T>(few_query_size<E>(p)) : nullptr) {
    if (!hides_any(p)) return;
    nonfinite_query.emplace(arena, p.head_dim);
    nonfinite_grad_output.emplace(arena, p.head_dim_v);
  }

  void load_keys(const Problem& p, Plane plane, int64_t key, int64_t count) {
    keys.load(key_rows<E>(p, plane), key, count);
    values.load(value_rows<E>(p, plane), key, count);
  }

  // Reads rows [row, row + rows) of query and grad_output.
  void load_rows(const Problem& p, const BackwardArgs& a, Plane plane, int64_t row, int64_t rows) {
    if (kInPairs<E>) {
      const int64_t first = row / p.group(), last = (row + rows - 1) / p.group();
      sees_few = 8 * (key_end(p, last) - key_begin(p, first)) <= p.seqlen_k;
    }
    has_grad_output = a.grad_output.data != nullptr;
    const int64_t count = padded<T>(rows);
    // Where pairs are hidden, separate_rows() writes to the rows. Of many keys a copy costs
    // nothing, and rows that are 4 KiB apart would share the same few places of the first-level
    // cache.
    const bool may_refer = !hides_any(p) && p.seqlen_k <= kReferKeys;
    const auto read = [&](const Input& input, RowOperand<E>& to, T factor) {
      to.read(rows_of<E>(p, input, plane), row, rows, count, factor, may_refer);
      to.zip(count);
    };
    read(p.query, query, 1);
    if (has_grad_output) read(a.grad_output, grad_output, T(dropout_scale(p.dropout_p)));
    if (few_query) pack_few_queries<E>(p, plane, row, rows, few_query);
  }

  // Packs a tile whose first row is row `lane` of those that were read.
  QKV_INLINE void pack(const Problem& p, const Tile& tile, int64_t lane, BackwardTile<E>& t) const {
    t.tile = tile;
    t.lane = lane;
    t.in_rows = in_rows;
    t.grad_query = grad_query_t + lane * padded<T>(p.head_dim);
    t.query = query.pack(lane, tile.lanes, T(p.scale), query_t + lane * packed_size<E>(p.head_dim));
    t.grad_output = {};
    if (has_grad_output)
      t.grad_output = grad_output.pack(lane, tile.lanes, 1,
                                       grad_output_t + lane * packed_size<E>(p.head_dim_v));
  }

  // Takes what is not finite out of the `rows` rows that dK and dV are products of, and keeps it
  // for add() of the two NonfiniteRows. Returns whether all was finite. Must be called after all
  // tiles are packed.
  bool separate_rows(int64_t rows) {
    const int64_t count = padded<T>(rows);
    const bool query_is_finite = nonfinite_query->separate(query, count);
    return (!has_grad_output || nonfinite_grad_output->separate(grad_output, count)) &&
           query_is_finite;
  }
};

}  // namespace qkv::QKV_ISA
