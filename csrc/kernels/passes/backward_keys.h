// What the backward pass does with some tiles of a block of rows against some keys, which are no
// more than a tile has: P and dS of every tile, and from these what the rows add to dK and dV. The
// loops around it are backward.h.
#pragma once

#include "kernels/passes/backward_rows.h"
#include "kernels/passes/double_grad_tile.h"
#include "kernels/passes/grad_tile.h"
#include "kernels/passes/walk.h"
#include "kernels/products/products.h"
#include "repair/counts.h"

namespace qkv::QKV_ISA {

// Sets P and dS of keys [from, to) of a tile to 0, and W' of the second derivative.
template <class S>
void clear_keys(const typename S::RowTile& t, int64_t from, int64_t to, const S& s) {
  const int64_t at = from * kGradRows + t.lane;
  clear_tile(t.tile, to - from, s.weights + at);
  clear_tile(t.tile, to - from, s.grad_scores + at);
  if constexpr (S::kTwice) clear_tile(t.tile, to - from, s.change + at);
  if (s.needs_marks) clear_tile(t.tile, to - from, s.marks + at);
}

// Where there are masks, as many tiles as have 32 rows are multiplied with the keys that they see,
// without the gaps between them: neighbours in a grid see far fewer keys than all rows of a block.
// The sums of dK and dV are then made of chains of so many additions, whatever a mask hides.
// Shorter ones would read and write sums more often.
template <class T>
constexpr int kMaskedTiles = std::max<int>(1, 32 / kTileRows<T>);

// sums [keys, padded(dim)] += the tiles of rows [begin, end) of a block, transposed, times the rows
// of `operand`, from which `nonfinite` takes what hidden pairs would add. chain: of how many rows.
template <class E, class Nonfinite, class T = Compute<E>>
void add_grad_rows(const Range& rows, int64_t chain, int64_t keys, const RowOperand<E>& operand,
                   const T* tiles, const Nonfinite& nonfinite, int64_t dim, T* sums,
                   const BackwardScratch<E>& s) {
  if (s.needs_marks && all_nan(sums, keys * padded<T>(dim))) return;
  const int64_t count = rows.end - rows.begin;
  // The next chain is to find the sums in the first-level cache, where those of half a block of
  // AVX-512 take 14 KiB (D = 64).
  const int64_t half = ((keys + 1) / 2 + kKeyStep - 1) / kKeyStep * kKeyStep;
  const int64_t step = chain < count ? half : keys;
  for (int64_t key = 0; key < keys; key += step)
    for (int64_t lane = rows.begin; lane < rows.end; lane += chain)
      add_over_rows(std::min(step, keys - key), s.as_a, tiles + key * kGradRows + lane,
                    std::min(chain, rows.end - lane), operand.rows(lane), dim, s.sees_few,
                    sums + key * padded<T>(dim), s.ahead);
  if (s.needs_marks) nonfinite->add(rows.begin, count, keys, s.marks + rows.begin, sums);
}

// Adds to dK [keys, padded(D)] and dV [keys, padded(Dv)] what these rows contribute, from P and dS
// in the scratch memory, or from P', W and W'.
template <class S, class T = typename S::T>
void add_grad_key_value(const Problem& p, const BackwardArgs& a, const Range& rows, int64_t keys,
                        T* grad_key, T* grad_value, const S& s) {
  const int64_t chain = s.has_few_keys ? kShortChain
                        : p.maps       ? kMaskedTiles<T> * kTileRows<T>
                                       : rows.end - rows.begin;
  if (a.grad_value.data && s.has_grad_output)
    add_grad_rows(rows, chain, keys, s.grad_output, s.weights, s.nonfinite_grad_output,
                  p.head_dim_v, grad_value, s);
  if (!a.grad_key.data) return;
  const auto add = [&](const auto& operand, const T* tiles, const auto& nonfinite) {
    add_grad_rows(rows, chain, keys, operand, tiles, nonfinite, p.head_dim, grad_key, s);
  };
  if constexpr (S::kTwice) {
    add(s.query, s.change, s.nonfinite_query);
    if (s.moves_query()) add(s.query_jvp, s.grad_scores, s.nonfinite_query_jvp);
  } else {
    add(s.query, s.grad_scores, s.nonfinite_query);
  }
}

// Where the sums of a key begin; null: not wanted.
template <class T>
T* sums_at(void* sums, int64_t key, int64_t dim) {
  return sums ? static_cast<T*>(sums) + key * padded<T>(dim) : nullptr;
}

// Some tiles of a block of rows against keys [key, key + keys), which are no more than a tile has.
template <class S>
void backward_keys(const Problem& p, const BackwardArgs& a, const BackwardItem& item,
                   const BackwardRows<S>& rows, const Range& tiles, int64_t key, int64_t keys,
                   S& s) {
  using T = typename S::T;
  // Only tiles [first, last] see some of these keys, and all that they see are keys [begin, end).
  Range seen[BackwardRows<S>::kMaxTiles];
  int64_t first = tiles.end, last = -1;
  int64_t begin = key + keys, end = key;
  for (int64_t t = tiles.begin; t < tiles.end; ++t) {
    seen[t] = keys_seen<kDepthMultiple<typename S::Element>>(p, rows.tiles[t].tile, key, keys);
    if (seen[t].is_empty()) continue;
    first = std::min(first, t), last = t;
    begin = std::min(begin, seen[t].begin), end = std::max(end, seen[t].end);
  }
  if (first > last) return;
  // Where bits are fixed, chains of additions over rows begin with the same row for tiles of any
  // size; and where there are several chains of masked rows, whatever is hidden.
  if (kFixedBits || (p.maps && tiles.end - tiles.begin > kMaskedTiles<T>))
    first = tiles.begin, last = tiles.end - 1;
  for (int64_t t = first; t <= last; ++t) {
    const auto& tile = rows.tiles[t];
    const auto [from, to] = seen[t].is_empty() ? Range{end, end} : seen[t];
    if (from < to)
      grad_tile(p, a, item, tile, from, to - from, (from - begin) * kGradRows + tile.lane, s);
    clear_keys(tile, 0, from - begin, s);
    clear_keys(tile, to - begin, end - begin, s);
  }
  const Range lanes{rows.tiles[first].lane, rows.tiles[last].lane + rows.tiles[last].tile.rows};
  add_grad_key_value(p, a, lanes, end - begin, sums_at<T>(item.sums.grad_key, begin, p.head_dim),
                     sums_at<T>(item.sums.grad_value, begin, p.head_dim_v), s);
}

// The same of a block of rows, where there are masks: by kMaskedTiles, or at once where each of
// these sees all keys, which takes a fifteenth less time for both passes (bf16, 1024 x 1024 x 64,
// Zen 4), and gives the same bits.
template <class S>
void backward_masked_keys(const Problem& p, const BackwardArgs& a, const BackwardItem& item,
                          const BackwardRows<S>& rows, int64_t key, int64_t keys, S& s) {
  const auto each_seen = [&](const Range& tiles, const auto& attend) {
    for_each_range_seen<kDepthMultiple<typename S::Element>>(p, rows.around(tiles), key, keys,
                                                             attend);
  };
  const auto tiles_from = [&](int64_t first, int64_t count) {
    return Range{first, std::min<int64_t>(first + count, rows.count)};
  };
  constexpr int64_t kStep = kMaskedTiles<typename S::T>;
  bool see_all = true;
  for (int64_t first = 0; see_all && first < rows.count; first += kStep) {
    see_all = false;
    each_seen(tiles_from(first, kStep), [&](int64_t, int64_t count) { see_all = count == keys; });
  }
  const int64_t step = see_all ? rows.count : kStep;
  for (int64_t first = 0; first < rows.count; first += step) {
    const Range tiles = tiles_from(first, step);
    each_seen(tiles, [&](int64_t begin, int64_t count) {
      backward_keys(p, a, item, rows, tiles, begin, count, s);
    });
  }
}

}  // namespace qkv::QKV_ISA
