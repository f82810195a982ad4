// Attention with linear biases (Press et al., arXiv:2108.12409), aligned as
// FlashAttention does it: score -= slope * |i + S - L - j|.
namespace qkv::QKV_ISA {

// i + S - L of each lane minus `key`: exact while it is less than 2^24 (f32).
template <class T>
QKV_INLINE Vec<T> distances(const Problem& p, const Tile& tile, int vector, int64_t key) {
  return positions<T>(p, tile, vector) + T(tile.first + p.seqlen_k - p.seqlen_q - key);
}

template <class T>
QKV_INLINE Vec<T> absolute(Vec<T> x) {
  return max<T>(x, -x);
}

template <class T>
void add_alibi(const Problem& p, const Tile& tile, int64_t key, int64_t keys, T* scores) {
  for (int v = 0; v < tile.lanes / kLanes<T>; ++v) {
    const Vec<T> slope = per_head<T>(p, tile, p.alibi_slopes, v);
    Vec<T> distance = distances<T>(p, tile, v, key);
    for (int64_t j = 0; j < keys; ++j, distance -= 1) {
      T* at = scores + j * tile.step + v * kLanes<T>;
      store(at, load(at) - slope * absolute<T>(distance));
    }
  }
}

// sums [G] -= sum over the tile of grad_score * |i + S - L - j|, head by head.
template <class T>
void add_grad_slopes(const Problem& p, const Tile& tile, int64_t key, int64_t keys,
                     const T* grad_scores, double* sums) {
  for (int v = 0; v < tile.lanes / kLanes<T>; ++v) {
    Vec<T> distance = distances<T>(p, tile, v, key), sum{};
    for (int64_t j = 0; j < keys; ++j, distance -= 1)
      sum += load(grad_scores + j * tile.step + v * kLanes<T>) * absolute<T>(distance);
    for (int l = 0; l < kLanes<T>; ++l) {
      const int lane = v * kLanes<T> + l;
      if (lane < tile.rows) sums[(tile.row + lane) % p.group()] -= double(sum[l]);
    }
  }
}

}  // namespace qkv::QKV_ISA
