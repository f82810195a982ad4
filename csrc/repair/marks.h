// The marks of a tile's pairs (counts.h), [keys x lanes, tile.step apart].
namespace qkv::QKV_ISA {

// Whether the mask or positions can hide one of these keys from one of the tile's rows.
inline bool hides_pairs(const Problem& p, const Tile& tile, int64_t key, int64_t keys) {
  return p.mask_type != MaskType::none ||
         hides_positions(p, tile.first, tile.last, key, key + keys);
}

template <class T>
void mark_pairs(const Problem& p, const Tile& tile, int64_t key, int64_t keys, const T* weights,
                T* marks) {
  for (int64_t j = 0; j < keys; ++j)
    for (int v = 0; v < tile.lanes; v += kLanes<T>) store(marks + j * tile.step + v, Vec<T>{});
  hide_pairs(p, tile, key, keys, marks);
  const Vec<T> hidden{}, positive = splat(T(kPositive)), makes_nan = splat(T(kMakesNaN));
  for (int64_t j = 0; j < keys; ++j)
    for (int v = 0; v < tile.lanes; v += kLanes<T>) {
      const int64_t at = j * tile.step + v;
      const Vec<T> visible = load(weights + at) > 0 ? positive : makes_nan;
      store(marks + at, load(marks + at) == -kInfinity<T> ? hidden : visible);
    }
}

// x [keys x lanes, tile.step apart] = 0 where a pair is hidden.
template <class T>
void clear_hidden(const Tile& tile, int64_t keys, const T* marks, T* x) {
  for (int64_t j = 0; j < keys; ++j)
    for (int v = 0; v < tile.lanes; v += kLanes<T>) {
      T* at = x + j * tile.step + v;
      store(at, load(marks + j * tile.step + v) == 0 ? Vec<T>{} : load(at));
    }
}

}  // namespace qkv::QKV_ISA
