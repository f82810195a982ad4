// The marks of a tile's pairs (counts.h), [keys x lanes, tile.step apart].
namespace qkv::QKV_ISA {

// Whether the mask or positions can hide one of these keys from one of the tile's rows.
inline bool hides_pairs(const Problem& p, const Tile& tile, int64_t key, int64_t keys) {
  return p.mask_type != MaskType::none || hides_positions(p, tile.first, tile.last, key, key + keys);
}

// kMakesNaN for all that are visible, whatever their weights.
template <class T>
void mark_visible(const Problem& p, const Tile& tile, int64_t key, int64_t keys, T* marks) {
  const auto each = [&](const auto& f) {
    for (int64_t j = 0; j < keys; ++j)
      for (int v = 0; v < tile.lanes; v += kLanes<T>) f(marks + j * tile.step + v);
  };
  each([](T* at) { store(at, Vec<T>{}); });
  hide_pairs(p, tile, key, keys, marks);
  each([](T* at) {
    store(at, load(at) == -kInfinity<T> ? Vec<T>{} : splat(T(kMakesNaN)));
  });
}

// kPositive for those of them whose weights are more than 0. Both [keys x lanes, step apart].
template <class T>
void mark_positive(int64_t lanes, int64_t step, int64_t keys, const T* weights, T* marks) {
  for (int64_t j = 0; j < keys; ++j)
    for (int64_t v = 0; v < lanes; v += kLanes<T>) {
      const int64_t at = j * step + v;
      const Vec<T> mark = load(marks + at), positive = splat(T(kPositive));
      store(marks + at, load(weights + at) > 0 ? (mark == 0 ? mark : positive) : mark);
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
