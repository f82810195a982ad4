// Masks: what is added to the scores from memory, and what a boolean mask, spans of keys
// (Problem::key_spans) or positions hide. The score of a hidden pair is set to -inf, whatever was
// computed for it, NaN included.
#pragma once

#include "kernels/operands/operands.h"
#include "kernels/simd/transpose.h"

namespace qkv::QKV_ISA {

// Whether the mask is the same for all rows of a plane, so that one element for each key will do.
template <class M>
bool same_for_all_rows(const Rows<const M>& rows) {
  return rows.row == 0 && (rows.head == 0 || rows.group == 1);
}

// A tile of a boolean mask in scratch memory: kByteLanes bytes for each key, kByteTile bytes in
// all.
template <class T>
constexpr int kByteLanes = kTileRows<T> < 16 ? 16 : kTileRows<T>;
template <class T>
constexpr int kByteTile = kKeyBlock * kByteLanes<T>;

// to [keys x kByteLanes] = the piece of a boolean mask that a tile covers, transposed 16 x 16 at a
// time.
template <class T>
void load_bytes(const Rows<const uint8_t>& rows, const Tile& tile, int64_t key, int64_t keys,
                uint8_t* to) {
  for (int lane = 0; lane < tile.lanes; lane += 16) {
    const uint8_t* from[16];
    for (int r = 0; r < 16; ++r)
      from[r] = rows[tile.row + std::min(lane + r, tile.rows - 1)] + key * rows.col;
    int64_t j = 0;
    if (rows.col == 1 && keys >= 16)
      for (; j < keys; j += 16) {
        j = std::min(j, keys - 16);  // the last square may begin within the one before
        Bytes square[16];
        QKV_UNROLL
        for (int r = 0; r < 16; ++r) std::memcpy(&square[r], from[r] + j, 16);
        transpose_bytes(square);
        QKV_UNROLL
        for (int i = 0; i < 16; ++i)
          std::memcpy(to + (j + i) * kByteLanes<T> + lane, &square[i], 16);
      }
    for (; j < keys; ++j)
      for (int r = 0; r < 16; ++r) to[j * kByteLanes<T> + lane + r] = from[r][j * rows.col];
  }
}

// Sets scores [keys x lanes] to -inf where a boolean mask is 0. Keys are tile.step elements apart.
template <class T>
void apply_boolean_mask(const Problem& p, const Input& mask, const Tile& tile, int64_t key,
                        int64_t keys, T* scores) {
  const Rows<const uint8_t> rows = score_rows_of<uint8_t>(p, mask, tile.plane);
  const auto apply = [&](int64_t j, int v, IntVec<T> may_attend) {
    T* at = scores + j * tile.step + v;
    store(at, may_attend != 0 ? load(at) : splat(-kInfinity<T>));
  };
  if (same_for_all_rows(rows)) {
    for (int64_t j = 0; j < keys; ++j)
      if (!rows.data[(key + j) * rows.col])
        for (int v = 0; v < tile.lanes; v += kLanes<T>) apply(j, v, IntVec<T>{});
    return;
  }
  uint8_t bytes[kByteTile<T>];
  load_bytes<T>(rows, tile, key, keys, bytes);
  for (int64_t j = 0; j < keys; ++j)
    for (int v = 0; v < tile.lanes; v += kLanes<T>)
      apply(j, v, native_widen(bytes + j * kByteLanes<T> + v, IntVec<T>{}));
}

// scores [keys x lanes] += a floating mask; with kHides, they are only set to -inf where it is.
// Keys are tile.step elements apart.
template <class T, class M, bool kHides>
void add_mask(const Problem& p, const Input& mask, const Tile& tile, int64_t key, int64_t keys,
              T* scores) {
  const Rows<const M> rows = score_rows_of<M>(p, mask, tile.plane);
  const auto add = [&](int64_t j, int v, Vec<T> bias) {
    T* at = scores + j * tile.step + v;
    store(at, bias == -kInfinity<T> ? bias : kHides ? load(at) : load(at) + bias);
  };
  if (same_for_all_rows(rows)) {
    for (int64_t j = 0; j < keys; ++j)
      for (int v = 0; v < tile.lanes; v += kLanes<T>)
        add(j, v, splat(T(widen(rows.data[(key + j) * rows.col]))));
    return;
  }
  read_tile<T>(rows, tile, key, keys, add);
}

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

// Hides the keys before and after those that each row may see by its position (visible.h). Both
// ends of what a row sees lie at a fixed distance from the row's own position.
template <class T>
void hide_positions(const Problem& p, const Tile& tile, int64_t key, int64_t keys, T* scores) {
  constexpr int W = kLanes<T>;
  const int64_t shift = p.bottom_right();
  int64_t ahead = p.is_causal ? p.top_left() + 1 : p.seqlen_k;
  if (p.window_right >= 0) ahead = std::min(ahead, shift + p.window_right + 1);
  const int64_t right = std::max(key, key_end(p, tile.first));  // all rows see what is before
  const int64_t left = std::min(key + keys, key_begin(p, tile.last));
  if (right >= key + keys && left <= key) return;
  for (int v = 0; v < tile.lanes / W; ++v) {
    // Positions count from the tile's first query: small numbers, which are exact in f32.
    const Vec<T> position = positions<T>(p, tile, v);
    const auto at = [&](int64_t j) { return scores + (j - key) * tile.step + v * W; };
    for (int64_t j = right; j < key + keys; ++j)
      store(at(j), position > T(j - tile.first - ahead) ? load(at(j)) : splat(-kInfinity<T>));
    for (int64_t j = key; j < left; ++j)
      store(at(j), position > T(j - tile.first - shift + p.window_left) ? splat(-kInfinity<T>)
                                                                        : load(at(j)));
  }
}

}  // namespace qkv::QKV_ISA
