// Attention with linear biases (Press et al., arXiv:2108.12409), aligned as
// FlashAttention does it: score -= slope * |i + S - L - j|.
#pragma once

#include "kernels/score/option.h"
#include "kernels/simd/vec.h"

namespace qkv::QKV_ISA {

// The distance |i + S - L - j| of the query i of each lane to the keys j = key, key + 1, ... Each
// call of next() returns that to the next key.
template <class T>
class Distances {
 public:
  // In f32, distances below 2^24 are exact, and larger ones are rounded.
  QKV_INLINE Distances(const Problem& p, const Tile& tile, int vector, int64_t key)
      : first_(positions<T>(p, tile, vector) + T(tile.first + p.bottom_right() - key)) {}

  QKV_INLINE Vec<T> next() {
    const Vec<T> distance = first_ - passed_;
    passed_ += 1;  // counted apart: in f32 a distance beyond 2^24, minus 1, could stay the same
    return max<T>(distance, -distance);
  }

 private:
  Vec<T> first_, passed_{};
};

template <class T>
void add_alibi(const Problem& p, const Input& slopes, const Tile& tile, int64_t key, int64_t keys,
               T* scores) {
  for (int v = 0; v < tile.lanes / kLanes<T>; ++v) {
    const Vec<T> slope = per_head<T>(p, tile, slopes, v);
    Distances<T> distances(p, tile, v, key);
    for (int64_t j = 0; j < keys; ++j) {
      T* at = scores + j * tile.step + v * kLanes<T>;
      store(at, load(at) - slope * distances.next());
    }
  }
}

// sums [G] -= the sum of grad_score * |i + S - L - j| over the rows of each head in the tile and
// its keys.
template <class T>
void add_grad_slopes(const Problem& p, const Tile& tile, int64_t key, int64_t keys,
                     const T* grad_scores, double* sums) {
  for (int v = 0; v < tile.lanes / kLanes<T>; ++v) {
    Distances<T> distances(p, tile, v, key);
    Vec<T> sum{};
    for (int64_t j = 0; j < keys; ++j)
      sum += load(grad_scores + j * tile.step + v * kLanes<T>) * distances.next();
    for (int l = 0; l < kLanes<T>; ++l) {
      const int lane = v * kLanes<T> + l;
      if (lane < tile.rows) sums[(tile.row + lane) % p.group()] -= double(sum[l]);
    }
  }
}

struct Alibi : ScoreOption<Alibi> {
  static bool is_set(const Problem& p) { return p.by_head[kAlibiSlopes].data; }
  static bool moves(const JvpArgs& a) { return a.by_head[kAlibiSlopes].data; }

  template <class T>
  static void apply(const Problem& p, const Tile& tile, int64_t key, int64_t keys, T* scores, T*) {
    add_alibi(p, p.by_head[kAlibiSlopes], tile, key, keys, scores);
  }
  template <class T>
  static void jvp(const Problem& p, const JvpArgs& a, const Tile& tile, int64_t key, int64_t keys,
                  const T*, T* change) {
    if (moves(a)) add_alibi(p, a.by_head[kAlibiSlopes], tile, key, keys, change);
  }
  template <class T>
  static void backward(const Problem& p, const BackwardArgs&, const BackwardItem& item,
                       const Tile& tile, int64_t key, int64_t keys, const T*, T* grad_scores) {
    double* const sums = item.sums.by_head[kAlibiSlopes];
    if (sums)
      add_grad_slopes(p, tile, key, keys, grad_scores, sums + tile.row / kGradRows * p.group());
  }
};

}  // namespace qkv::QKV_ISA
