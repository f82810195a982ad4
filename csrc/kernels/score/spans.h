// Spans of keys (Problem::key_spans): what lies outside all spans of a query is hidden.
#pragma once

#include "kernels/operands/rows.h"
#include "kernels/operands/tile.h"

namespace qkv::QKV_ISA {

// Sets scores [keys x lanes] of keys outside all spans of their row to -inf. Keys are tile.step
// elements apart.
template <class T>
void hide_outside_spans(const Problem& p, const Tile& tile, int64_t key, int64_t keys, T* scores) {
  constexpr int W = kLanes<T>;
  using Int = std::remove_reference_t<decltype(IntVec<T>{}[0])>;
  const auto rows = score_rows_of<int32_t>(p, p.key_spans.input, tile.plane);
  IntVec<T> seen[kKeyBlock];
  for (int lane = 0; lane < tile.lanes; lane += W) {
    // Lanes without a row have the last row's spans.
    const int32_t* at[W];
    for (int l = 0; l < W; ++l) at[l] = rows[tile.row + std::min(lane + l, tile.rows - 1)];
    std::fill_n(seen, keys, IntVec<T>{});
    for (int64_t n = 0; n < 2 * p.key_spans.count; n += 2) {
      // One span of each row, as numbers of keys from `key` on, and [first, last) around them.
      Int begins[W], ends[W];
      int64_t first = keys, last = 0;
      for (int l = 0; l < W; ++l) {
        begins[l] = Int(at[l][n * rows.col] - key), ends[l] = Int(at[l][(n + 1) * rows.col] - key);
        first = std::min<int64_t>(first, begins[l]), last = std::max<int64_t>(last, ends[l]);
      }
      if (first >= keys || last <= 0) continue;
      IntVec<T> begin, end;
      std::memcpy(&begin, begins, sizeof begin), std::memcpy(&end, ends, sizeof end);
      for (int64_t j = std::max<int64_t>(0, first); j < std::min(last, keys); ++j)
        seen[j] |= (begin <= Int(j)) & (end > Int(j));
    }
    for (int64_t j = 0; j < keys; ++j) {
      T* const to = scores + j * tile.step + lane;
      store(to, seen[j] != 0 ? load(to) : splat(-kInfinity<T>));
    }
  }
}

}  // namespace qkv::QKV_ISA
