// All options that act on scores, in the order of the formula in attention.h: softcap, ALiBi,
// masks, positions.
#pragma once

#include "kernels/operands/tile.h"
#include "kernels/score/alibi.h"
#include "kernels/score/mask.h"
#include "kernels/score/softcap.h"

namespace qkv::QKV_ISA {

// Adds a mask to scores [keys x lanes] and sets those that it hides to -inf; with kHides, it does
// only the latter.
template <class T, bool kHides = false>
void apply_mask(const Problem& p, const Mask& mask, const Tile& tile, int64_t key, int64_t keys,
                T* scores) {
  const auto add = [&](auto* apply) { apply(p, mask.input, tile, key, keys, scores); };
  switch (mask.type) {
    case MaskType::none:
      break;
    case MaskType::boolean:
      return add(apply_boolean_mask<T>);
    case MaskType::f32:
      return add(add_mask<T, float, kHides>);
    case MaskType::f64:
      return add(add_mask<T, double, kHides>);
    case MaskType::bf16:
      return add(add_mask<T, BFloat16, kHides>);
    case MaskType::f16:
      return add(add_mask<T, Float16, kHides>);
  }
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

// Whether apply_score_options changes a score of these keys.
inline bool changes_scores(const Problem& p, const Tile& tile, int64_t key, int64_t keys) {
  return p.softcap > 0 || p.alibi_slopes.data || has_masks(p) ||
         hides_positions(p, tile.first, tile.last, key, key + keys);
}

// scores [keys x lanes]: dot products times scale before, scores after. tanhs [keys x lanes], if
// not null, gets what softcap_backward needs.
template <class T>
void apply_score_options(const Problem& p, const Tile& tile, int64_t key, int64_t keys, T* scores,
                         T* tanhs) {
  if (p.softcap > 0) softcap(p, tile, keys, scores, tanhs);
  if (p.alibi_slopes.data) add_alibi(p, p.alibi_slopes, tile, key, keys, scores);
  hide_pairs(p, tile, key, keys, scores);
}

}  // namespace qkv::QKV_ISA
