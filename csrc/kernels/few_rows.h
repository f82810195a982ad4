// Products for a tile of few rows, as when decoding: vectors run along the head
// dimension, so that each element of a key and of a value is loaded once, whole
// cache lines at a time, for all rows. With rows in the lanes most would be idle,
// and every element a broadcast.
namespace qkv::QKV_ISA {

// How far ahead memory is asked for: with fewer keys decoding waits for it, with
// more what came is gone again.
constexpr int64_t kKeysAhead = 16;

// At most this many rows, and whole vectors of contiguous dimensions.
template <class T>
bool runs_along_dimensions(const Problem& p, const Tile& tile) {
  return tile.rows <= kLanes<T> / 2 && p.key.strides.col == 1 && p.value.strides.col == 1 &&
         p.head_dim % kLanes<T> == 0 && p.head_dim_v % kLanes<T> == 0;
}

// scores[key * step + row] = dot products of ROWS rows of queries with as many
// keys as make one vector of sums, or fewer.
template <class T, int ROWS>
QKV_INLINE void dot_block(int64_t dim, int64_t keys, const T* key, int64_t key_row, const T* query,
                          T* scores, int64_t step) {
  constexpr int W = kLanes<T>, KEYS = W / ROWS;
  Vec<T> sum[W];
  const T* row[KEYS];
  QKV_UNROLL
  for (int i = 0; i < W; ++i) sum[i] = Vec<T>{};
  QKV_UNROLL
  for (int j = 0; j < KEYS; ++j) row[j] = key + std::min<int64_t>(j, keys - 1) * key_row;
  for (int64_t d = 0; d < dim; d += W) {
    QKV_UNROLL
    for (int j = 0; j < KEYS; ++j) {
      __builtin_prefetch(row[j] + kKeysAhead * key_row + d);
      const Vec<T> k = load(row[j] + d);
      QKV_UNROLL
      for (int r = 0; r < ROWS; ++r) sum[j * ROWS + r] += k * load(query + r * dim + d);
    }
  }
  exchange<T, W / 2>(sum);
  QKV_UNROLL
  for (int h = W / 2; h > 0; h /= 2) {
    QKV_UNROLL
    for (int i = 0; i < h; ++i) sum[i] += sum[i + h];
  }
  QKV_UNROLL
  for (int i = 0; i < W; ++i)
    if (i / ROWS < keys) scores[i / ROWS * step + i % ROWS] = sum[0][i];
}

template <class T, int ROWS>
void dot_rows(int64_t dim, int64_t keys, const T* key, int64_t key_row, const T* query, T* scores,
              int64_t step) {
  constexpr int KEYS = kLanes<T> / ROWS;
  for (int64_t j = 0; j < keys; j += KEYS)
    dot_block<T, ROWS>(dim, keys - j, key + j * key_row, key_row, query, scores + j * step, step);
}

// scores [keys, lanes], those of lanes without a row 0. query [rows, D].
template <class T>
void few_scores(const Problem& p, const Tile& tile, int64_t keys, const T* key, const T* query,
                T* scores) {
  const int64_t dim = p.head_dim, row = p.key.strides.row;
  std::fill_n(scores, keys * tile.lanes, T(0));
  int r = 0;
  if constexpr (kLanes<T> >= 4)
    for (; r + 4 <= tile.rows; r += 4)
      dot_rows<T, 4>(dim, keys, key, row, query + r * dim, scores + r, tile.lanes);
  for (; r + 2 <= tile.rows; r += 2)
    dot_rows<T, 2>(dim, keys, key, row, query + r * dim, scores + r, tile.lanes);
  for (; r < tile.rows; ++r)
    dot_rows<T, 1>(dim, keys, key, row, query + r * dim, scores + r, tile.lanes);
}

// output [rows, Dv] = rescale * output + weights^T * values.
template <class T>
void few_outputs(const Problem& p, const Tile& tile, int64_t keys, const T* value, const T* weights,
                 const T* rescale, T* output) {
  const int64_t dim = p.head_dim_v, row = p.value.strides.row;
  for (int r = 0; r < tile.rows; ++r)
    for (int64_t d = 0; d < dim; d += kLanes<T>)
      store(output + r * dim + d, load(output + r * dim + d) * rescale[r]);
  // Few keys at a time: a product goes over its keys once for every two vectors
  // of columns, and all but the first time they should be close.
  for (int64_t j = 0; j < keys; j += kKeysAhead) {
    for (int64_t i = j; i < std::min(keys, j + kKeysAhead); ++i)
      for (int64_t d = 0; d < dim; d += int64_t(kCacheLine / sizeof(T)))
        __builtin_prefetch(value + (i + kKeysAhead) * row + d);
    gemm<T>(tile.rows, dim,
            {std::min(kKeysAhead, keys - j), weights + j * tile.lanes, 1, tile.lanes,
             value + j * row, row, output, dim, Beta::one, nullptr});
  }
}

}  // namespace qkv::QKV_ISA
