// All options that act on scores, in the order of the formula in attention.h: softcap, ALiBi, mask,
// positions.
namespace qkv::QKV_ISA {

// Adds the mask to scores [keys x lanes], and sets those that it or positions hide to -inf.
template <class T>
void hide_pairs(const Problem& p, const Tile& tile, int64_t key, int64_t keys, T* scores) {
  switch (p.mask_type) {
    case MaskType::none:
      break;
    case MaskType::boolean:
      apply_boolean_mask<T>(p, tile, key, keys, scores);
      break;
    case MaskType::f32:
      add_mask<T, float>(p, tile, key, keys, scores);
      break;
    case MaskType::f64:
      add_mask<T, double>(p, tile, key, keys, scores);
      break;
    case MaskType::bf16:
      add_mask<T, BFloat16>(p, tile, key, keys, scores);
      break;
    case MaskType::f16:
      add_mask<T, Float16>(p, tile, key, keys, scores);
      break;
  }
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
