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

// Of a boolean mask and the rows of eight lanes: bit l of each byte of to [B], which are those of
// keys j, j + 1, ..., says whether lane l may see the key. What lies `ahead` keys
// further (keys_ahead) is prefetched.
template <class B>
QKV_INLINE void load_bits_of_keys(const uint8_t* const (&from)[8], int64_t j, int64_t ahead,
                                  uint8_t* to) {
  B bits{};
  QKV_UNROLL
  for (int l = 0; l < 8; ++l) {
    B row;
    std::memcpy(&row, from[l] + j, sizeof row);
    __builtin_prefetch(from[l] + j + ahead, 0, 2);
    const uint8_t own_bit = uint8_t(1u << l);
    bits |= (B)(row != 0) & own_bit;
  }
  std::memcpy(to + j, &bits, sizeof bits);
}

// bits [padded(keys)]: bit l of each says whether lane l may see the key, by the piece of a boolean
// mask that a tile covers.
inline void load_bits(const Rows<const uint8_t>& rows, const Tile& tile, int64_t key, int64_t keys,
                      int64_t ahead, int32_t* bits) {
  typedef uint8_t Few __attribute__((vector_size(16)));
  typedef uint8_t Many __attribute__((vector_size(kVectorBytes)));
  const int64_t step = keys >= kVectorBytes ? kVectorBytes : 16;
  std::fill_n(bits, padded<float>(keys), 0);
  for (int lane = 0; lane < tile.lanes; lane += 8) {
    const uint8_t* from[8];
    for (int l = 0; l < 8; ++l)
      from[l] = rows[tile.row + std::min(lane + l, tile.rows - 1)] + key * rows.col;
    uint8_t of_lanes[padded<float>(kKeyBlock)] = {};
    int64_t j = 0;
    // The last step may begin within the one before.
    for (; rows.col == 1 && keys >= step && j < keys; j += step)
      (step == 16 ? load_bits_of_keys<Few>
                  : load_bits_of_keys<Many>)(from, std::min(j, keys - step), ahead, of_lanes);
    for (; j < keys; ++j)
      for (int l = 0; l < 8; ++l) of_lanes[j] |= (from[l][j * rows.col] != 0) << l;
    for (j = 0; j < keys; j += kLanes<float>) {
      IntVec<float> all;
      std::memcpy(&all, bits + j, sizeof all);
      all |= native_widen(of_lanes + j, IntVec<float>{}) << lane;
      std::memcpy(bits + j, &all, sizeof all);
    }
  }
}

// Sets scores [keys x lanes] to -inf where a boolean mask is 0. Keys are tile.step elements apart.
template <class T>
void apply_boolean_mask(const Problem& p, const Input& mask, const Tile& tile, int64_t key,
                        int64_t keys, T* scores) {
  const Rows<const uint8_t> rows = score_rows_of<uint8_t>(p, mask, tile.plane);
  if (same_for_all_rows(rows)) {
    for (int64_t j = 0; j < keys; ++j)
      if (!rows.data[(key + j) * rows.col])
        std::fill_n(scores + j * tile.step, tile.lanes, -kInfinity<T>);
    return;
  }
  int32_t bits[padded<float>(kKeyBlock)];
  load_bits(rows, tile, key, keys, keys_ahead(p, key, keys), bits);
  for (int lane = 0; lane < tile.lanes; lane += kLanes<T>) {
    IntVec<T> own_bit;
    for (int l = 0; l < kLanes<T>; ++l) own_bit[l] = int32_t(1u << (lane + l));
    for (int64_t j = 0; j < keys; ++j) {
      T* const at = scores + j * tile.step + lane;
      store(at, (own_bit & bits[j]) != 0 ? load(at) : splat(-kInfinity<T>));
    }
  }
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
  read_tile<T>(p, rows, tile, key, keys, add);
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
