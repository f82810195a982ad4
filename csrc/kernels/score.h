// From dot products to scores: what is added to them and what is masked.
//
// A masked score is -inf whatever was computed for it, NaN included.
namespace qkv::QKV_ISA {

template <class T>
struct MaskScratch {
  T* rows;  // [lanes, padded(kKeyBlock)]
  T* tile;  // [padded(kKeyBlock), lanes]

  explicit MaskScratch(Arena& arena, const Problem& p) : rows(nullptr), tile(nullptr) {
    if (p.mask_type == MaskType::none) return;
    rows = arena.take<T>(kRowBlock<T> * padded<T>(kKeyBlock));
    tile = arena.take<T>(kRowBlock<T> * padded<T>(kKeyBlock));
  }
};

template <class T>
QKV_INLINE T bias_of(uint8_t may_attend) {
  return may_attend ? T(0) : -kInfinity<T>;
}
template <class T>
QKV_INLINE T bias_of(float mask) {
  return mask;
}
template <class T>
QKV_INLINE T bias_of(double mask) {
  return T(mask);
}

// kLanes<T> neighbouring mask elements.
template <class T, class M>
QKV_INLINE Vec<T> bias_vector(const M* mask) {
  typedef M Narrow __attribute__((vector_size(kLanes<T> * sizeof(M))));
  Narrow m;
  std::memcpy(&m, mask, sizeof(m));
  if constexpr (std::is_same_v<M, uint8_t>) {
    const IntVec<T> may_attend = __builtin_convertvector(m, IntVec<T>);
    return may_attend != 0 ? Vec<T>{} : splat(-kInfinity<T>);
  } else {
    return __builtin_convertvector(m, Vec<T>);
  }
}

template <class T>
QKV_INLINE Vec<T> add_bias(Vec<T> score, Vec<T> bias) {
  return bias == -kInfinity<T> ? bias : score + bias;
}

// scores [keys x lanes, step apart] += the mask of `tile` and keys [key, key + keys).
template <class T, class M>
void add_mask(const Problem& p, const Tile& tile, int64_t key, int64_t keys,
              const MaskScratch<T>& scratch, T* scores) {
  constexpr int W = kLanes<T>;
  const Rows<const M> rows = rows_of<M>(p, p.mask, tile.batch, tile.kv_head);
  const int64_t col = rows.col;

  // The same for every row: one broadcast a key.
  if (rows.row == 0 && (rows.head == 0 || rows.group == 1)) {
    const M* mask = rows.data + key * col;
    for (int64_t j = 0; j < keys; ++j) {
      const T bias = bias_of<T>(mask[j * col]);
      if (bias == 0) continue;
      for (int v = 0; v < tile.lanes; v += W)
        store(scores + j * tile.step + v,
              add_bias<T>(load(scores + j * tile.step + v), splat(bias)));
    }
    return;
  }

  const int64_t columns = padded<T>(keys);
  for (int r = 0; r < tile.lanes; ++r) {
    const M* mask = rows[tile.row + std::min(r, tile.rows - 1)] + key * col;
    T* to = scratch.rows + r * columns;
    int64_t j = 0;
    if (col == 1)
      for (; j + W <= keys; j += W) store(to + j, bias_vector<T>(mask + j));
    for (; j < keys; ++j) to[j] = bias_of<T>(mask[j * col]);
    for (; j < columns; ++j) to[j] = 0;
  }
  transpose<T>(scratch.rows, columns, scratch.tile, tile.lanes, tile.lanes, columns, T(1));
  for (int64_t j = 0; j < keys; ++j) {
    T* at = scores + j * tile.step;
    for (int v = 0; v < tile.lanes; v += W)
      store(at + v, add_bias<T>(load(at + v), load(scratch.tile + j * tile.lanes + v)));
  }
}

// Keys after a row's own query position, in scores [keys x lanes, step apart].
template <class T>
void mask_future(const Problem& p, const Tile& tile, int64_t key, int64_t keys, T* scores) {
  constexpr int W = kLanes<T>;
  for (int v = 0; v < tile.lanes; v += W) {
    // Relative to the tile's first query, so that it fits the lane's integer.
    IntVec<T> query{};
    for (int l = 0; l < W; ++l) query[l] = (tile.row + v + l) / p.group() - tile.first;
    for (int64_t j = std::max<int64_t>(0, tile.first + 1 - key); j < keys; ++j) {
      const IntVec<T> position = IntVec<T>{} + decltype(query[0] + 0)(key + j - tile.first);
      T* at = scores + j * tile.step + v;
      store(at, position > query ? splat(-kInfinity<T>) : load(at));
    }
  }
}

template <class T>
void apply_score_options(const Problem& p, const Tile& tile, int64_t key, int64_t keys,
                         const MaskScratch<T>& scratch, T* scores) {
  switch (p.mask_type) {
    case MaskType::none:
      break;
    case MaskType::boolean:
      add_mask<T, uint8_t>(p, tile, key, keys, scratch, scores);
      break;
    case MaskType::f32:
      add_mask<T, float>(p, tile, key, keys, scratch, scores);
      break;
    case MaskType::f64:
      add_mask<T, double>(p, tile, key, keys, scratch, scores);
      break;
  }
  if (p.is_causal && key + keys > tile.first + 1) mask_future(p, tile, key, keys, scores);
}

}  // namespace qkv::QKV_ISA
