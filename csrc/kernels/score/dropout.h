// Dropout by Philox4x32-7 (philox.h). There is one counter for each lane and eight consecutive
// keys, so that each of the four words that come out decides on two of the keys for a whole vector
// of rows.
#pragma once

#include "kernels/operands/tile.h"
#include "kernels/simd/vec.h"

namespace qkv::QKV_ISA {

using Counter = Vec<uint64_t>;

// Philox on vectors whose lanes of 64 bits hold numbers of 32. The high half of a lane may hold
// anything between rounds, because the multiplications read only the low half.
struct Philox {
  Counter keys[kPhiloxRounds][2];

  Philox() = default;
  explicit Philox(uint64_t seed) {
    uint32_t low = uint32_t(seed), high = uint32_t(seed >> 32);
    for (auto& key : keys) {
      key[0] = splat<uint64_t>(low), key[1] = splat<uint64_t>(high);
      low += kPhiloxWeyl[0], high += kPhiloxWeyl[1];
    }
  }

  QKV_INLINE void operator()(Counter (&c)[4]) const {
    const Counter m0 = splat<uint64_t>(kPhiloxMultiplier[0]);
    const Counter m1 = splat<uint64_t>(kPhiloxMultiplier[1]);
    QKV_UNROLL
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const Counter p0 = native_mul_low(c[0], m0), p1 = native_mul_low(c[2], m1);
      c[0] = (p1 >> 32) ^ c[1] ^ keys[round][0];
      c[1] = p1;
      c[2] = (p0 >> 32) ^ c[3] ^ keys[round][1];
      c[3] = p0;
    }
  }
};

// Decides which weights of a tile are kept.
template <class T>
class Dropout {
  static constexpr int W = kLanes<T>;
  // How many vectors of counters W rows need: for f32 two, those of even and those of odd lanes.
  static constexpr int kStreams = 8 / sizeof(T);

 public:
  const T scale;  // what weights that are kept are multiplied by

  explicit Dropout(const Problem& p)
      : scale(T(dropout_scale(p.dropout_p))), threshold_(dropout_threshold(p.dropout_p)) {
    if (p.dropout_p > 0 && !p.dropout_seeds) philox_ = Philox(p.dropout_seed);
  }

  // Calls each(j, lane, kept) for every j in [0, keys) and every vector of the tile: `kept` says
  // for key key + j and the lanes from `lane` on whether the weight is kept, by all bits of a lane
  // set or none.
  template <class Each>
  QKV_INLINE void operator()(const Problem& p, const Tile& tile, int64_t key, int64_t keys,
                             const Each& each) const {
    Philox of_item;
    if (p.dropout_seeds) of_item = Philox(p.seed_of(tile.plane.batch));
    const Philox& philox = p.dropout_seeds ? of_item : philox_;
    for (int lane = 0; lane < tile.lanes; lane += W) {
      Counter row[kStreams][3] = {};
      counters(p, tile, lane, row);
      const int64_t begin = key + p.shard.key_offset;
      for (int64_t at = begin / kPhiloxKeys; at * kPhiloxKeys < begin + keys; ++at) {
        Counter words[kStreams][4];
        QKV_UNROLL
        for (int s = 0; s < kStreams; ++s) {
          words[s][0] = splat<uint64_t>(uint64_t(at));
          words[s][1] = row[s][0], words[s][2] = row[s][1], words[s][3] = row[s][2];
          philox(words[s]);
        }
        const int64_t first = at * kPhiloxKeys - begin;
        QKV_UNROLL
        for (int n = 0; n < kPhiloxKeys; ++n)
          if (first + n >= 0 && first + n < keys) each(first + n, lane, kept(words, n));
      }
    }
  }

 private:
  // The three words of the counters that depend on the row: the query, and the low and the high
  // half of batch * H + head. Element i of row[stream] belongs to lane stream + kStreams * i.
  static void counters(const Problem& p, const Tile& tile, int lane, Counter (&row)[kStreams][3]) {
    const int64_t heads = p.dropout_plane(tile.plane.batch, tile.plane.kv_head * p.group());
    for (int l = 0; l < W; ++l) {
      const int64_t r = tile.row + lane + l, plane = heads + r % p.group();
      Counter(&of)[3] = row[l % kStreams];
      of[0][l / kStreams] = uint64_t(r / p.group() + p.shard.query_offset);
      of[1][l / kStreams] = uint32_t(plane);
      of[2][l / kStreams] = uint64_t(plane) >> 32;
    }
  }

  // Of the nth key of a counter.
  QKV_INLINE IntVec<T> kept(const Counter (&words)[kStreams][4], int n) const {
    typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
    const Counter low = words[0][n % 4] & 0xffffffff;
    Words word = (Words)(kStreams == 1 ? low : low | words[kStreams - 1][n % 4] << 32);
    if (n >= 4) word = word >> 16 | word << 16;
    if constexpr (kStreams == 1) return (IntVec<T>)((IntVec<T>)word >= int64_t(threshold_));
    return (IntVec<T>)(word >= threshold_);
  }

  Philox philox_;  // of Problem::dropout_seed
  uint32_t threshold_;
};

// Sets dropped weights [keys x lanes] to 0. They are multiplied by 0, so that NaN stays NaN.
template <class T>
void drop_weights(const Problem& p, const Dropout<T>& dropout, const Tile& tile, int64_t key,
                  int64_t keys, T* weights) {
  dropout(p, tile, key, keys, [&](int64_t j, int lane, IntVec<T> kept) {
    T* at = weights + j * tile.step + lane;
    const Vec<T> weight = load(at);
    store(at, kept ? weight : weight * 0);
  });
}

// Drops weights after grad_softmax, which took all of them for kept, and corrects grad_scores: that
// of a dropped pair is weight * (0 * dP - delta).
template <class T>
void drop_weights_backward(const Problem& p, const Dropout<T>& dropout, const Tile& tile,
                           int64_t key, int64_t keys, const T* delta, T* weights, T* grad_scores) {
  dropout(p, tile, key, keys, [&](int64_t j, int lane, IntVec<T> kept) {
    const int64_t at = j * tile.step + lane;
    const Vec<T> weight = load(weights + at), grad = load(grad_scores + at);
    store(weights + at, kept ? weight : weight * 0);
    store(grad_scores + at, kept ? grad : grad * 0 - weight * load(delta + lane));
  });
}

}  // namespace qkv::QKV_ISA
