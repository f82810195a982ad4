// All that hides pairs, as one option: the masks, which may also add to scores, and positions.
#pragma once

#include "kernels/score/grad_mask.h"
#include "kernels/score/mask.h"
#include "kernels/score/option.h"

namespace qkv::QKV_ISA {

// Adds a mask to scores [keys x lanes] and sets those that it hides to -inf; with kHides, it does
// only the latter. A floating mask is of f32 or of the problem's dtype (Mask): there is no code for
// f64 beside scores of f32, or for halves beside those of f64.
template <class T, bool kHides = false>
void apply_mask(const Problem& p, const Mask& mask, const Tile& tile, int64_t key, int64_t keys,
                T* scores) {
  with_elements(mask.type, [&](auto element) {
    using M = decltype(element);
    if constexpr (std::is_same_v<M, uint8_t>)
      apply_boolean_mask(p, mask.input, tile, key, keys, scores);
    else if constexpr (std::is_same_v<M, float> || std::is_same_v<Compute<M>, T>)
      add_mask<T, M, kHides>(p, mask.input, tile, key, keys, scores);
  });
}

// Whether masks change a score of these queries and keys [key, end), or positions hide one.
inline bool hides_pairs(const Problem& p, const MapView& view, int64_t key, int64_t end) {
  return (p.maps && !masks_are_plain(p, view, key, end)) || hides_by_function(p) ||
         hides_positions(p, view.first, view.last, key, end);
}

// Adds all masks to scores [keys x lanes], and sets those that one of them or spans hide to -inf.
// Masks that are plain there (common/mask_map.h) are not read.
template <class T>
void apply_masks(const Problem& p, const Tile& tile, int64_t key, int64_t keys, T* scores) {
  bool applies[kMaps];
  for (int m = 0; m < kMaps; ++m) {
    const MaskMap& map = p.maps->of[m];
    applies[m] = map.rows && !tile.map_view().is_plain(p, map, key, key + keys);
  }
  // The first mask, which alone may be boolean, comes last: so what it hides stays hidden, whatever
  // is added. What another one hides, a floating first mask may have made NaN.
  static_assert(kMasks <= 2);
  for (int m = kMasks - 1; m >= 0; --m)
    if (applies[m]) apply_mask(p, p.masks[m], tile, key, keys, scores);
  for (int m = 1; m < kMasks; ++m)
    if (applies[m] && is_floating(p.masks[0]) && is_floating(p.masks[m]))
      apply_mask<T, true>(p, p.masks[m], tile, key, keys, scores);
  if (applies[kSpansMap]) hide_outside_spans(p, tile, key, keys, scores);
}

// The same, and sets to -inf what positions hide.
template <class T>
void hide_pairs(const Problem& p, const Tile& tile, int64_t key, int64_t keys, T* scores) {
  if (p.maps) apply_masks(p, tile, key, keys, scores);
  if (hides_positions(p)) hide_positions(p, tile, key, keys, scores);
}

struct Masks : ScoreOption<Masks> {
  static bool is_set(const Problem& p) { return hides_any(p); }
  static bool changes(const Problem& p, const Tile& tile, int64_t key, int64_t keys) {
    return hides_pairs(p, tile.map_view(), key, key + keys);
  }
  static bool moves(const JvpArgs& a) {
    return std::any_of(a.masks.begin(), a.masks.end(), is_floating);
  }

  template <class T>
  static void apply(const Problem& p, const Tile& tile, int64_t key, int64_t keys, T* scores, T*) {
    hide_pairs(p, tile, key, keys, scores);
  }
  template <class T>
  static void jvp(const Problem& p, const JvpArgs& a, const Tile& tile, int64_t key, int64_t keys,
                  const T*, T* change) {
    for (const Mask& mask : a.masks) apply_mask(p, mask, tile, key, keys, change);
  }
  template <class T>
  static void backward(const Problem& p, const BackwardArgs& a, const BackwardItem& item,
                       const Tile& tile, int64_t key, int64_t keys, const T*, T* grad_scores) {
    for (int m = 0; m < kMasks; ++m) add_grad_mask(p, a, item, m, tile, key, keys, grad_scores);
  }
};

}  // namespace qkv::QKV_ISA
