// What is added to the scores from memory, and what positions hide.
//
// A masked score is -inf whatever was computed for it, NaN included.
namespace qkv::QKV_ISA {

// For bringing a [rows, keys] piece of a user's tensor to [keys x lanes] and back.
template <class T>
struct MaskScratch {
  T* rows;  // [lanes, padded(kKeyBlock)]
  T* tile;  // [padded(kKeyBlock), lanes]

  MaskScratch(Arena& arena, bool needed) : rows(nullptr), tile(nullptr) {
    if (!needed) return;
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

// scratch.tile [keys x lanes] = elements of a [B..., H, L, S] tensor.
template <class T, class M>
void load_tile(const Rows<const M>& rows, const Tile& tile, int64_t key, int64_t keys,
               const MaskScratch<T>& scratch) {
  constexpr int W = kLanes<T>;
  const int64_t columns = padded<T>(keys), col = rows.col;
  for (int r = 0; r < tile.lanes; ++r) {
    const M* from = rows[tile.row + std::min(r, tile.rows - 1)] + key * col;
    T* to = scratch.rows + r * columns;
    int64_t j = 0;
    if (col == 1)
      for (; j + W <= keys; j += W) store(to + j, bias_vector<T>(from + j));
    for (; j < keys; ++j) to[j] = bias_of<T>(from[j * col]);
    for (; j < columns; ++j) to[j] = 0;
  }
  transpose<T>(scratch.rows, columns, scratch.tile, tile.lanes, tile.lanes, columns, T(1));
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

  load_tile(rows, tile, key, keys, scratch);
  for (int64_t j = 0; j < keys; ++j) {
    T* at = scores + j * tile.step;
    for (int v = 0; v < tile.lanes; v += W)
      store(at + v, add_bias<T>(load(at + v), load(scratch.tile + j * tile.lanes + v)));
  }
}

// Hides keys on either side of what each row may see (visible.h). Both ends lie
// at a fixed distance from the row's own position.
template <class T>
void hide_positions(const Problem& p, const Tile& tile, int64_t key, int64_t keys, T* scores) {
  constexpr int W = kLanes<T>;
  const int64_t shift = p.seqlen_k - p.seqlen_q;
  int64_t ahead = p.is_causal ? 1 : p.seqlen_k;
  if (p.window_right >= 0) ahead = std::min(ahead, shift + p.window_right + 1);
  const int64_t right = std::max(key, key_end(p, tile.first));  // all rows see what is before
  const int64_t left = std::min(key + keys, key_begin(p, tile.last));
  if (right >= key + keys && left <= key) return;
  for (int v = 0; v < tile.lanes / W; ++v) {
    // Relative to the tile's first query: small numbers, so exact where it matters.
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
