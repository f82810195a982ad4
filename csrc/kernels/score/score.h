// All options that act on scores, in the order of the formula in attention.h: softcap, ALiBi,
// masks, positions.
namespace qkv::QKV_ISA {

// Adds a mask to scores [keys x lanes], or sets those that it hides to -inf.
template <class T>
void apply_mask(const Problem& p, const Mask& mask, const Tile& tile, int64_t key, int64_t keys,
                T* scores) {
  const auto add = [&](auto* apply) { apply(p, mask.input, tile, key, keys, scores); };
  switch (mask.type) {
    case MaskType::none:
      break;
    case MaskType::boolean:
      return add(apply_boolean_mask<T>);
    case MaskType::f32:
      return add(add_mask<T, float>);
    case MaskType::f64:
      return add(add_mask<T, double>);
    case MaskType::bf16:
      return add(add_mask<T, BFloat16>);
    case MaskType::f16:
      return add(add_mask<T, Float16>);
  }
}

// Adds all masks to scores [keys x lanes], and sets those that one of them or positions hide to
// -inf.
template <class T>
void hide_pairs(const Problem& p, const Tile& tile, int64_t key, int64_t keys, T* scores) {
  for (const Mask& mask : p.masks) apply_mask(p, mask, tile, key, keys, scores);
  if (hides_positions(p)) hide_positions(p, tile, key, keys, scores);
}

// scores [keys x lanes]: dot products times scale before, scores after. slope [keys x lanes], if
// not null, gets the derivative of softcap.
template <class T>
void apply_score_options(const Problem& p, const Tile& tile, int64_t key, int64_t keys, T* scores,
                         T* slope) {
  if (p.softcap > 0) softcap(p, tile, keys, scores, slope);
  if (p.alibi_slopes.data) add_alibi(p, tile, key, keys, scores);
  hide_pairs(p, tile, key, keys, scores);
}

}  // namespace qkv::QKV_ISA
