// In-cache transposition of whole vectors.
namespace qkv::QKV_ISA {

// Lanes of stage `h` of a W x W transposition: exchange the off-diagonal h x h
// blocks of every 2h x 2h block. `high` picks the second of the two results.
template <class T>
QKV_INLINE IntVec<T> exchange_lanes(int h, bool high) {
  constexpr int W = kLanes<T>;
  IntVec<T> index{};
  QKV_UNROLL
  for (int l = 0; l < W; ++l)
    index[l] = high ? ((l & h) ? W + l : l + h) : ((l & h) ? W + l - h : l);
  return index;
}

template <class T, int h>
QKV_INLINE void exchange(Vec<T>* rows) {
  if constexpr (h > 0) {
    QKV_UNROLL
    for (int i = 0; i < kLanes<T>; ++i) {
      if (i & h) continue;
      const Vec<T> a = rows[i], b = rows[i + h];
      rows[i] = __builtin_shuffle(a, b, exchange_lanes<T>(h, false));
      rows[i + h] = __builtin_shuffle(a, b, exchange_lanes<T>(h, true));
    }
    exchange<T, h / 2>(rows);
  }
}

// out[c][r] = factor * in[r][c]; rows and columns are multiples of kLanes<T>.
template <class T>
void transpose(const T* in, int64_t in_row, T* out, int64_t out_row, int64_t rows, int64_t columns,
               T factor) {
  constexpr int W = kLanes<T>;
  for (int64_t r = 0; r < rows; r += W) {
    for (int64_t c = 0; c < columns; c += W) {
      Vec<T> block[W];
      QKV_UNROLL
      for (int i = 0; i < W; ++i) block[i] = factor * load(in + (r + i) * in_row + c);
      exchange<T, W / 2>(block);
      QKV_UNROLL
      for (int i = 0; i < W; ++i) store(out + (c + i) * out_row + r, block[i]);
    }
  }
}

}  // namespace qkv::QKV_ISA
