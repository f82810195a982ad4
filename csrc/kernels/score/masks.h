// All that hides pairs, as one option: the masks, which may also add to scores, and positions.
#pragma once

#include "kernels/score/grad_mask.h"
#include "kernels/score/mask.h"
#include "kernels/score/option.h"

namespace qkv::QKV_ISA {

// Adds a mask to scores [keys x lanes] and sets those that it hides to -inf; with kHides, it does
// only the latter.
template <class T, bool kHides = false>
void apply_mask(const Problem& p, const Mask& mask, const Tile& tile, int64_t key, int64_t keys,
                T* scores) {
  with_elements(mask.type, [&](auto element) {
    using M = decltype(element);
    if constexpr (std::is_same_v<M, uint8_t>)
      apply_boolean_mask(p, mask.input, tile, key, keys, scores);
    else
      add_mask<T, M, kHides>(p, mask.input, tile, key, keys, scores);
  });
}

// Adds all masks to scores [keys x lanes], and sets those that one of them or positions hide to
// -inf.
template <class T>
void hide_pairs(const Problem& p, const Tile& tile, int64_t key, int64_t keys, T* scores) {
  // The first mask, which alone may be boolean, comes last: so what it hides stays hidden, whatever
  // is added. What another one hides, a floating first mask may have made NaN.
  static_assert(kMasks <= 2);
  for (int m = kMasks - 1; m >= 0; --m) apply_mask(p, p.masks[m], tile, key, keys, scores);
  for (int m = 1; m < kMasks; ++m)
    if (is_floating(p.masks[0]) && is_floating(p.masks[m]))
      apply_mask<T, true>(p, p.masks[m], tile, key, keys, scores);
  if (hides_positions(p)) hide_positions(p, tile, key, keys, scores);
}

struct Masks : ScoreOption<Masks> {
  static bool is_set(const Problem& p) { return hides_any(p); }
  static bool changes(const Problem& p, const Tile& tile, int64_t key, int64_t keys) {
    return has_masks(p) || hides_positions(p, tile.first, tile.last, key, key + keys);
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
