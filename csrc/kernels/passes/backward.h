// The backward pass over one BackwardItem: some rows of one plane against some of its keys. With P
// the weights, dP = dO V^T and delta as in grad_rows.h, the gradient of the scores
// is dS = P * (dP - delta), and there are five products:
//
//   S^T = K Q^T    dP^T = V dO^T    dQ^T += K^T dS^T    dV += P^T dO    dK += dS^T Q
//
// The loop over rows is outside and the loop over keys inside: a block of rows is packed once an
// item, while dK and dV of the item's keys are summed in the second-level cache.
//
// The second derivative has the same loops around other tiles, those of double_softmax.h, with ten
// products (docs/report.md, "Derivatives, to the second order"). So the loops are templates of the
// scratch memory S, a BackwardScratch or a DoubleScratch (S::kTwice), and grad_tile has an overload
// for each.
#pragma once

#include "kernels/passes/backward_ahead.h"
#include "kernels/passes/backward_keys.h"
#include "kernels/passes/backward_rows.h"

namespace qkv::QKV_ISA {

// Sets s.hides_pairs, whether pairs of these rows and keys [key, key_end) are hidden, and
// s.needs_marks, whether something in the rows is not finite and could leak through such pairs.
// Whether keys are finite is looked at tile by tile, in grad_tile.
template <class S>
void look_for_nonfinite(const Problem& p, const BackwardRows<S>& rows, int64_t key, int64_t key_end,
                        S& s) {
  s.hides_pairs =
      hides_any(p) &&
      hides_pairs(p, {rows.first().plane, rows.first().first, rows.last().last}, key, key_end);
  s.needs_marks = false;
  if (!s.hides_pairs) return;
  const bool rows_are_finite = s.separate_rows(rows.rows);
  s.needs_marks = !rows_are_finite || !s.statistics_are_finite(rows.rows);
  if constexpr (S::kTwice) {
    const bool rows_jvp_are_finite = s.separate_rows_jvp(rows.rows);
    s.needs_marks |= !rows_jvp_are_finite || !s.statistics_jvp_are_finite(rows.rows);
  }
}

// One block of rows against one strip of keys, [begin, end).
template <class S>
void backward_strip(const Problem& p, const BackwardArgs& a, const BackwardItem& item,
                    const BackwardRows<S>& rows, int64_t begin, int64_t end, S& s) {
  const int64_t step = key_step(end - begin);
  const Range all = keys_of_tiles(rows.tiles, rows.count);
  const int64_t stop = std::min(end, all.end);
  begin += std::max<int64_t>(0, all.begin - begin) / step * step;
  for (int64_t key = begin; key < stop; key += step)
    p.maps ? backward_masked_keys(p, a, item, rows, key, std::min(step, end - key), s)
           : backward_keys(p, a, item, rows, {0, rows.count}, key, std::min(step, end - key), s);
}

// One block of rows against all keys of the item.
template <class S>
void backward_rows(const Problem& p, const BackwardArgs& a, const BackwardItem& item, int64_t row,
                   int64_t count, BackwardAhead<S>& ahead, S& s) {
  using T = typename S::T;
  const BackwardRows<S> rows(p, a, item.plane, row, count, s);
  ahead.begin_rows(rows, row + count, item.row_end, s);
  const Rows<T> sums{static_cast<T*>(item.sums.grad_query), p.group(), item.sums.query_head,
                     item.sums.query_row, 1};
  QuerySums* const its = item.sums.query_sums + row / kGradRows;
  if (sums.data) load_grad_query(p, sums, *its == QuerySums::begun, rows, s);
  look_for_nonfinite(p, rows, item.key_begin, item.key_end, s);
  const int64_t strips = (item.key_end - item.key_begin + item.strip_keys - 1) / item.strip_keys;
  for (int64_t n = 0; n < strips; ++n) {
    const int64_t strip = item.descends ? strips - 1 - n : n;
    const int64_t begin = item.key_begin + strip * item.strip_keys;
    backward_strip(p, a, item, rows, begin, std::min(item.key_end, begin + item.strip_keys), s);
  }
  if (!sums.data) return;
  store_grad_query(p, a, item, sums, rows, s);
  *its = item.completes_rows ? QuerySums::complete : QuerySums::begun;
}

template <class S>
size_t backward_by(const Problem& p, const BackwardArgs& a, const BackwardItem& item,
                   void* workspace) {
  const int64_t keys = item.key_end - item.key_begin;
  Arena arena(workspace);
  S s(arena, p, a, keys);
  if (arena.counting()) return arena.used();
  s.load_keys(p, item.plane, item.key_begin, keys);
  if constexpr (S::kTwice) s.load_keys_jvp(p, item.plane, item.key_begin, keys);
  const int64_t begin = std::max(item.row_begin, grad_row_begin(p, item.key_begin));
  const int64_t end = std::min(item.row_end, grad_row_end(p, item.key_end));
  BackwardAhead<S> ahead(p, a, item);
  for (int64_t row = begin; row < end; row += kGradRows) {
    const int64_t count = std::min(kGradRows, item.row_end - row);
    const MapView view{item.plane, row / p.group(), (row + count - 1) / p.group()};
    // A block of rows that sees none of the keys is not packed; finish_rows knows what it lacks.
    if (p.maps && keys_shown(p, view, {item.key_begin, item.key_end}).is_empty()) continue;
    backward_rows(p, a, item, row, count, ahead, s);
  }
  return arena.used();
}

template <class E>
size_t backward(const Problem& p, const BackwardArgs& a, const BackwardItem& item,
                void* workspace) {
  if constexpr (!kInPairs<E>)
    if (a.direction) return backward_by<DoubleScratch<E>>(p, a, item, workspace);
  return backward_by<BackwardScratch<E>>(p, a, item, workspace);
}

}  // namespace qkv::QKV_ISA
