// sum_j weight_ij * dweight_ij for every row i. The backward pass of the weights needs this number
// of a row before it can begin with it, as delta.
#pragma once

#include "kernels/operands/rows.h"
#include "kernels/operands/tile.h"
#include "kernels/passes/backward.h"
#include "kernels/passes/grad_tile.h"
#include "kernels/score/grad_mask.h"
#include "kernels/score/hidden.h"

namespace qkv::QKV_ISA {

// Uses the tiles of the backward pass: with delta = 0, its dS is weight * dweight.
template <class E>
void weights_dot(const Problem& p, const BackwardArgs& args, const Output& dot,
                 const ForwardItem& item, void* workspace) {
  using T = Compute<E>;
  Arena arena(workspace);
  BackwardScratch<E> s(arena, p, 0);
  BackwardArgs a;
  a.lse = args.lse;
  a.grad_weights = args.grad_weights;
  const Rows<T> out = rows_of<T>(p, dot, item.batch, item.kv_head);
  const int64_t step = key_step(p.seqlen_k);
  for (int64_t row = item.row_begin; row < item.row_end; row += kGradRows) {
    const BackwardRows<BackwardScratch<E>> rows(p, a, item.batch, item.kv_head, row,
                                                std::min(kGradRows, item.row_end - row), s);
    s.hides_pairs = hides_any(p);
    s.needs_marks = s.hides_pairs && !s.statistics_are_finite(rows.rows);
    double sums[kGradRows] = {};
    const int64_t end = rows.last().key_end;
    for (int64_t key = 0; key < end; key += step) {
      s.load_keys(p, item.batch, item.kv_head, key, std::min(step, end - key));
      for (int t = 0; t < rows.count; ++t) {
        const BackwardTile<E>& tile = rows.tiles[t];
        const int64_t begin = std::max(key, tile.tile.key_begin);
        const int64_t keys = std::min(key + step, tile.tile.key_end) - begin;
        if (keys <= 0 || masks_hide_tile<T>(p, tile.tile, begin, keys)) continue;
        grad_scores_of_tile(p, a, tile, begin, keys, tile.lane, s);
        add_row_sums(tile.tile, keys, s.grad_scores + tile.lane, sums + tile.lane);
      }
    }
    for (int64_t r = 0; r < rows.rows; ++r) *out[row + r] = T(sums[r]);
  }
}

}  // namespace qkv::QKV_ISA
