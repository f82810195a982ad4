// What the weights of rows add up to, and delta = sum_j weight_ij * dP_ij, with dP_ij all that
// reaches a weight, <dO_i, V_j> + dweight_ij: for the rows of which common/row_sums.h says that the
// backward pass needs these numbers. Weights before they are divided add up to 1 + d, and delta
// would be off by d times itself. So it is divided by that sum, to which the sink's weight belongs.
#pragma once

#include "common/row_sums.h"
#include "kernels/passes/backward.h"
#include "kernels/passes/grad_tile.h"
#include "kernels/passes/walk.h"
#include "kernels/score/dropout.h"
#include "kernels/score/sinks.h"
#include "kernels/simd/exp_of.h"
#include "kernels/simd/halves.h"

namespace qkv::QKV_ISA {

// The sums over the keys of a block of rows.
struct WeightSums {
  double weights[kGradRows] = {};   // of weight_ij, before dropout
  double products[kGradRows] = {};  // of weight_ij * dP_ij, of those that dropout keeps
};

// sums [tile.rows] += the sum of numbers [keys x lanes] over the keys. It is made in double,
// because an error of delta is in the gradients of all scores of the row, and adds up in those of a
// slope.
template <class T>
void add_in_double(const Tile& tile, int64_t keys, const T* numbers, double* sums) {
  constexpr int W = kLanes<double>;
  for (int v = 0; v < tile.lanes; v += W) {
    Vec<double> sum{};
    for (int64_t j = 0; j < keys; ++j) sum += load_double(numbers + j * tile.step + v);
    for (int l = v; l < std::min(v + W, tile.rows); ++l) sums[l] += sum[l - v];
  }
}

// Adds up the weights of a tile with keys [key, key + keys). `whole` is the problem without
// dropout: with delta = 0, the dS of its backward pass is weight * dP.
template <class E>
void add_weights(const Problem& whole, const Problem& p, const BackwardArgs& a,
                 const BackwardTile<E>& of, int64_t key, int64_t keys, BackwardScratch<E>& s,
                 WeightSums& sums) {
  grad_scores_of_tile(whole, a, of, key, keys, of.lane, s);
  if (p.dropout_p > 0) drop_weights(p, s.dropout, of.tile, key, keys, s.grad_scores + of.lane);
  add_in_double(of.tile, keys, s.weights + of.lane, sums.weights + of.lane);
  add_in_double(of.tile, keys, s.grad_scores + of.lane, sums.products + of.lane);
}

// The weight of the sink of row `row`, whose log-sum-exp is lse; 0 if there are no sinks.
inline double sink_weight(const Problem& p, const ForwardItem& item, int64_t row, double lse) {
  const double* const sink = sink_of_row(p, item.plane, row);
  return sink ? exp_of_number(*sink - lse) : 0;
}

// Whether the gradients of the weights of a block of rows are finite, if they have any.
template <class T>
bool grad_weights_are_finite(const Problem& p, const BackwardArgs& a, Plane plane, int64_t row,
                             int64_t rows) {
  if (!a.grad_weights.data) return true;
  const auto grads = score_rows_of<T>(p, a.grad_weights, plane);
  for (int64_t r = row; r < row + rows; ++r)
    if (!all_finite(Matrix<T>{grads[r], 0, grads.col}, 1, p.seqlen_k)) return false;
  return true;
}

// Brings into `sums` what the weights of a block of rows add up to, over all keys.
template <class E>
void add_all_weights(const Problem& p, const BackwardArgs& a,
                     const BackwardRows<BackwardScratch<E>>& rows, BackwardScratch<E>& s,
                     WeightSums& sums) {
  Problem whole = p;
  whole.dropout_p = 0;
  // Of rows whose dP is NaN by right, <dO_i, O_i> is not finite.
  s.hides_pairs = hides_any(p);
  s.needs_marks = s.hides_pairs && !(s.statistics_are_finite(rows.rows) &&
                                     grad_weights_are_finite<Compute<E>>(p, a, rows.first().plane,
                                                                         rows.row, rows.rows));
  std::fill_n(s.delta, kGradRows, Compute<E>(0));
  for_each_block<1>(
      p, rows.tiles, rows.count, {0, p.seqlen_k}, key_step(p.seqlen_k),
      [&](int64_t key, int64_t keys, int64_t) { s.load_keys(p, rows.first().plane, key, keys); },
      [&](const BackwardTile<E>& of, int64_t key, int64_t keys) {
        add_weights(whole, p, a, of, key, keys, s, sums);
      });
}

// Writes the two numbers of every row of the item. Of rows that do not want theirs, these are
// <dO_i, O_i> and 1; the first is left as well where it is not finite, and so the same in all
// types.
template <class E>
size_t row_sums(const Problem& p, const BackwardArgs& args, const Output& to,
                const ForwardItem& item, void* workspace) {
  using T = Compute<E>;
  Arena arena(workspace);
  BackwardScratch<E> s(arena, p, args, 0);
  if (arena.counting()) return arena.used();
  s.has_few_keys = false;  // tiles of few keys would divide the weights by their sum themselves
  BackwardArgs a = args;
  a.grad_lse = {};
  const Rows<T> out = rows_of<T>(p, to, item.plane);
  const Rows<const T> lse = rows_of<T>(p, a.lse, item.plane);
  for (int64_t row = item.row_begin; row < item.row_end; row += kGradRows) {
    const BackwardRows<BackwardScratch<E>> rows(p, a, item.plane, row,
                                                std::min(kGradRows, item.row_end - row), s);
    bool wanted[kGradRows] = {}, any_wanted = false;
    for (int64_t r = 0; r < rows.rows; ++r) {
      any_wanted |= wanted[r] = sums_row(p, a, *lse[row + r]);
      out[row + r][0] = s.delta[r], out[row + r][1] = 1;
    }
    if (!any_wanted) continue;
    WeightSums sums;
    add_all_weights(p, a, rows, s, sums);
    for (int64_t r = 0; r < rows.rows; ++r) {
      if (!wanted[r]) continue;
      // Without weights there is nothing to divide, whatever the sink is.
      const double total = sums.weights[r] + sink_weight(p, item, row + r, *lse[row + r]);
      const bool divides =
          sums.weights[r] != 0 && (a.grad_weights.data || qkv::are_whole(total, *lse[row + r]));
      if (divides) out[row + r][1] = T(total);
      if (a.grad_weights.data || (divides && std::isfinite(out[row + r][0])))
        out[row + r][0] = T(sums.products[r] / (divides ? total : 1));
    }
  }
  return arena.used();
}

}  // namespace qkv::QKV_ISA
