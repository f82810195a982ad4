// Spans of keys (Problem::key_spans): what lies outside all spans of a query is hidden.
#pragma once

#include "kernels/operands/rows.h"
#include "kernels/operands/tile.h"

namespace qkv::QKV_ISA {

// One span of each lane of a vector, as numbers of keys of a tile: small ones, which are exact in
// f32. [first, last) holds all of them.
template <class T>
struct SpanLanes {
  Vec<T> begin{}, end{};
  int64_t first, last = 0;

  // Span n of the rows from `lane` on; lanes without a row have none.
  SpanLanes(const Rows<const int32_t>& rows, const Tile& tile, int lane, int64_t n, int64_t key,
            int64_t keys)
      : first(keys) {
    for (int l = 0; l < std::min(kLanes<T>, tile.rows - lane); ++l) {
      const int32_t* const at = rows[tile.row + lane + l] + 2 * n * rows.col;
      const int64_t from = std::max<int64_t>(0, at[0] - key);
      const int64_t to = std::min(keys, at[rows.col] - key);
      if (from >= to) continue;
      begin[l] = T(from), end[l] = T(to);
      first = std::min(first, from), last = std::max(last, to);
    }
  }
};

// Sets scores [keys x lanes] of keys outside all spans of their row to -inf. Keys are tile.step
// elements apart.
template <class T>
void hide_outside_spans(const Problem& p, const Tile& tile, int64_t key, int64_t keys, T* scores) {
  const auto rows = score_rows_of<int32_t>(p, p.key_spans.input, tile.plane);
  IntVec<T> seen[kKeyBlock];
  for (int lane = 0; lane < tile.lanes; lane += kLanes<T>) {
    std::fill_n(seen, keys, IntVec<T>{});
    for (int64_t n = 0; n < p.key_spans.count; ++n) {
      const SpanLanes<T> span(rows, tile, lane, n, key, keys);
      for (int64_t j = span.first; j < span.last; ++j)
        seen[j] |= (span.begin <= T(j)) & (span.end > T(j));
    }
    for (int64_t j = 0; j < keys; ++j) {
      T* const at = scores + j * tile.step + lane;
      store(at, seen[j] != 0 ? load(at) : splat(-kInfinity<T>));
    }
  }
}

}  // namespace qkv::QKV_ISA
