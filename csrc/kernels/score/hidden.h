// Whether masks hide a whole tile, which then need not be computed: padding, and whatever else a
// caller writes out as a mask, costs what its visible keys cost.
//
// To leave a tile out changes no bit. Its weights are 0, its maximum is -inf, and so what has been
// summed before would be multiplied by 1.
#pragma once

#include "kernels/operands/rows.h"
#include "kernels/operands/tile.h"
#include "kernels/operands/user_tile.h"
#include "kernels/score/mask.h"

namespace qkv::QKV_ISA {

// Whether `keys` elements of a mask, col apart, hide their keys: bytes that are 0, numbers that are
// -inf.
template <class T>
bool hide_all(const uint8_t* at, int64_t col, int64_t keys) {
  int64_t j = 0;
  if (col == 1)
    for (; j + 8 <= keys; j += 8) {
      uint64_t eight;
      std::memcpy(&eight, at + j, 8);
      if (eight) return false;
    }
  for (; j < keys; ++j)
    if (at[j * col]) return false;
  return true;
}

template <class T, class M>
bool hide_all(const M* at, int64_t col, int64_t keys) {
  Vec<T> others{};
  int64_t j = 0;
  for (; j + kLanes<T> <= keys; j += kLanes<T>) {
    const Vec<T> some = read_vector<T>(at + j * col, col, kLanes<T>);
    others += some == -kInfinity<T> ? Vec<T>{} : splat(T(1));
  }
  if (any_nonzero<T>(others)) return false;
  for (; j < keys; ++j)
    if (T(widen(at[j * col])) != -kInfinity<T>) return false;
  return true;
}

// Whether the mask hides all of keys [key, key + keys) from all rows of the tile. They are asked
// from the last to the first, until one says no: under a causal mask the last row sees the most
// keys.
template <class T>
bool mask_hides_tile(const Problem& p, const Mask& mask, const Tile& tile, int64_t key,
                     int64_t keys) {
  bool hides = false;
  with_elements(mask.type, [&](auto element) {
    using M = decltype(element);
    const Rows<const M> rows = score_rows_of<M>(p, mask.input, tile.plane);
    const int first = same_for_all_rows(rows) ? tile.rows - 1 : 0;
    int r = tile.rows - 1;
    while (r >= first && hide_all<T>(rows[tile.row + r] + key * rows.col, rows.col, keys)) --r;
    hides = r < first;
  });
  return hides;
}

// Whether one of the masks does.
template <class T>
bool masks_hide_tile(const Problem& p, const Tile& tile, int64_t key, int64_t keys) {
  for (const Mask& mask : p.masks)
    if (mask_hides_tile<T>(p, mask, tile, key, keys)) return true;
  return false;
}

// Those of keys [key, key + keys) that rows of the tile see, or a range around them that begins a
// multiple of kMultiple after `key`, where an operand may begin; empty where positions or masks
// hide all of them.
template <class T, int64_t kMultiple>
Range keys_seen(const Problem& p, const Tile& tile, int64_t key, int64_t keys) {
  const int64_t skip = std::max<int64_t>(0, tile.key_begin - key) / kMultiple * kMultiple;
  const Range range{key + skip, std::min(key + keys, tile.key_end)};
  if (!range.is_empty() && masks_hide_tile<T>(p, tile, range.begin, range.end - range.begin))
    return {key, key};
  return range;
}

}  // namespace qkv::QKV_ISA
