// The online softmax (Milakov and Gimelshein, arXiv:1805.02867), lane by lane
// down a tile of scores in units of log 2: no horizontal operation anywhere.
namespace qkv::QKV_ISA {

// -inf - -inf would be NaN: a lane that has seen nothing but masked keys
// subtracts 0 instead, and every weight of it comes out as exactly 0.
template <class T>
QKV_INLINE Vec<T> finite_max(Vec<T> max) {
  return max == -kInfinity<T> ? Vec<T>{} : max;
}

// scores [keys x lanes] become weights relative to the new maximum; `rescale`
// is what everything summed before must be multiplied by.
template <class T, int NV>
void softmax_tile(int64_t keys, T* scores, T* max_state, T* sum_state, T* rescale) {
  constexpr int W = kLanes<T>;
  constexpr int kLanesOfTile = NV * W;
  // Two chains a vector hide the latency of max and add.
  Vec<T> top[2][NV];
  QKV_UNROLL
  for (int v = 0; v < NV; ++v) top[0][v] = top[1][v] = load(max_state + v * W);
  int64_t j = 0;
  for (; j + 2 <= keys; j += 2) {
    QKV_UNROLL
    for (int c = 0; c < 2; ++c) {
      QKV_UNROLL
      for (int v = 0; v < NV; ++v)
        top[c][v] = max<T>(top[c][v], load(scores + (j + c) * kLanesOfTile + v * W));
    }
  }
  if (j < keys) {
    QKV_UNROLL
    for (int v = 0; v < NV; ++v)
      top[0][v] = max<T>(top[0][v], load(scores + j * kLanesOfTile + v * W));
  }

  Vec<T> shift[NV], sum[NV];
  QKV_UNROLL
  for (int v = 0; v < NV; ++v) {
    const Vec<T> max_new = max<T>(top[0][v], top[1][v]);
    shift[v] = finite_max<T>(max_new);
    store(rescale + v * W, exp2<T>(load(max_state + v * W) - shift[v]));
    store(max_state + v * W, max_new);
    sum[v] = Vec<T>{};
  }
  for (j = 0; j < keys; ++j) {
    QKV_UNROLL
    for (int v = 0; v < NV; ++v) {
      T* at = scores + j * kLanesOfTile + v * W;
      const Vec<T> weight = exp2<T>(load(at) - shift[v]);
      sum[v] += weight;
      store(at, weight);
    }
  }
  QKV_UNROLL
  for (int v = 0; v < NV; ++v)
    store(sum_state + v * W, load(sum_state + v * W) * load(rescale + v * W) + sum[v]);
}

}  // namespace qkv::QKV_ISA
