// What the pass for second derivatives (backward.h) has besides what the backward pass has:
// the directions as operands, what it knows of a block of rows, and its scratch memory.
#pragma once

#include "attention_jvp.h"
#include "kernels/passes/backward_operands.h"
#include "kernels/passes/grad_rows.h"
#include "repair/nonfinite_rows.h"

namespace qkv::QKV_ISA {

template <class E>
struct DoubleTile : BackwardTile<E> {
  RightOperand<Factor<E>> query_jvp;  // Q'^T [D x lanes], times scale
};

template <class E>
struct DoubleScratch : BackwardScratch<E> {
  using RowTile = DoubleTile<E>;
  using T = Compute<E>;
  using F = Factor<E>;
  static constexpr bool kTwice = true;

  const BackwardDirection& direction;
  RowOperand<E> query_jvp;  // of the block of rows
  GradKeys<E> keys_jvp;     // of the item, as are values_jvp
  KeyOperand<E> values_jvp;
  F* query_jvp_t;  // memory for the operands of tiles
  std::optional<NonfiniteRows<E, Infinities::as_nan>> nonfinite_query_jvp;
  // lse', and delta'_i = <dO_i, O'_i>. [kGradRows] each.
  T *lse_jvp, *delta_jvp;
  // [padded(kKeyBlock), kGradRows] each, as BackwardScratch has them: the changes of scores; what
  // grad_output makes of the values' directions; which pairs dropout keeps, or null.
  T *change, *grad_change, *kept_pairs;
  ScoreTiles<T> changes;  // of the scores before the options that keep something

  DoubleScratch(Arena& arena, const Problem& p, const BackwardArgs& a, int64_t key_count)
      : BackwardScratch<E>(arena, p, a, key_count),
        direction(*a.direction),
        query_jvp(arena, kGradRows, p.head_dim),
        keys_jvp(arena, p, direction.along.key, key_count),
        values_jvp(arena, copies_rows<E>(p, direction.along.value), key_count, p.head_dim_v,
                   Use::rows),
        query_jvp_t(arena.take<F>(kGradRows * packed_size<E>(p.head_dim))),
        lse_jvp(arena.take<T>(kGradRows)),
        delta_jvp(arena.take<T>(kGradRows)),
        change(take_tiles(arena, true)),
        grad_change(take_tiles(arena, true)),
        kept_pairs(take_tiles(arena, p.dropout_p > 0)),
        changes(take_score_tiles<T>(arena, p, kKeyBlock * kGradRows)) {
    if (hides_any(p)) nonfinite_query_jvp.emplace(arena, p.head_dim);
    this->in_rows &= !moves_key() || multiplies_by_rows<E>(direction.along.key, p.head_dim);
  }

  bool moves_query() const { return direction.along.query.data != nullptr; }
  bool moves_key() const { return direction.along.key.data != nullptr; }
  bool moves_value() const { return direction.along.value.data != nullptr; }

  // These four do with the directions what those of BackwardOperands without _jvp do with the rest.
  void load_keys_jvp(const Problem& p, Plane plane, int64_t key, int64_t count) {
    const JvpArgs& along = direction.along;
    if (moves_key()) keys_jvp.load(KeyRows<E>(p, plane, p.head_dim, along.key), key, count);
    if (moves_value()) values_jvp.load(KeyRows<E>(p, plane, p.head_dim_v, along.value), key, count);
  }
  void load_rows_jvp(const Problem& p, Plane plane, int64_t row, int64_t rows) {
    if (!moves_query()) return;
    const int64_t count = padded<T>(rows);
    query_jvp.read(rows_of<E>(p, direction.along.query, plane), row, rows, count);
    query_jvp.zip(count);
  }
  void pack_jvp(const Problem& p, DoubleTile<E>& t) const {
    t.query_jvp = {};
    if (moves_query())
      t.query_jvp = query_jvp.pack(t.lane, t.tile.lanes, T(p.scale),
                                   query_jvp_t + t.lane * packed_size<E>(p.head_dim));
  }
  bool separate_rows_jvp(int64_t rows) {
    return !moves_query() || nonfinite_query_jvp->separate(query_jvp, padded<T>(rows));
  }

  // Whether lse' and delta' of the first `rows` rows are finite.
  bool statistics_jvp_are_finite(int64_t rows) const {
    T zero = 0;
    for (int64_t r = 0; r < rows; ++r) zero += (lse_jvp[r] + delta_jvp[r]) * 0;
    return zero == 0;
  }

 private:
  static T* take_tiles(Arena& arena, bool wanted) {
    return wanted ? arena.take<T>(padded<T>(kKeyBlock) * kGradRows) : nullptr;
  }
};

// What load_statistics does for the backward pass, and the same for the directions.
template <class E>
void load_statistics(const Problem& p, const BackwardArgs& a, Plane plane, int64_t row,
                     int64_t rows, const DoubleScratch<E>& s) {
  using T = Compute<E>;
  load_statistics(p, a, plane, row, rows, static_cast<const BackwardScratch<E>&>(s));
  const Rows<const E> output_jvp = rows_of<E>(p, s.direction.output_jvp, plane);
  const Rows<const E> grad_output = rows_of<E>(p, a.grad_output, plane);
  const Rows<const T> lse_jvp = rows_of<T>(p, s.direction.lse_jvp, plane);
  std::fill_n(s.lse_jvp, kGradRows, T(0));
  std::fill_n(s.delta_jvp, kGradRows, T(0));
  for (int64_t r = 0; r < rows; ++r) s.lse_jvp[r] = *lse_jvp[row + r];
  if (grad_output.data) row_dots(grad_output, output_jvp, row, rows, p.head_dim_v, s.delta_jvp);
}

}  // namespace qkv::QKV_ISA
