// The online softmax (Milakov and Gimelshein, arXiv:1805.02867), lane by lane
// down a tile of scores: no horizontal operation anywhere.
#pragma once

#include "kernels/simd/exp.h"

namespace qkv::QKV_ISA {

// The number that is subtracted from the scores of a lane so that their exponentials neither
// overflow nor vanish: base + shift * log(2), which is about the largest score.
//
// It is not exactly the largest score: `shift` is a multiple of 16, and most often 0. Applying it
// rounds nothing, unlike a subtraction, and it rarely changes from one block of keys to the next.
// `base` is for scores so large that the integers of ShiftedExp cannot hold the shift; it has to be
// subtracted (subtract_base). Both are 0 where the largest score is -inf, in a lane that has seen
// nothing but hidden keys: -inf - -inf would be NaN, while with 0 its weights come out as exactly
// 0.
template <class T>
struct Reference {
  Vec<T> base, shift;

  explicit QKV_INLINE Reference(Vec<T> max) {
    // With kLarge, the magic number minus kSteps * shift (ShiftedExp) stays in [2^23, 2^24), where
    // adding it rounds to integers; without FMA see Exp2::kLn2High.
    constexpr T kGrid = 16;
    constexpr T kLarge = T(kSteps<T> > 1 ? 1 << 17 : kHasFma ? 1 << 20 : 1 << 14);
    constexpr T kMagic = Exp2<T>::kMagic - Exp2<T>::kBias;  // rounds to integers
    const Vec<T> zero{};
    const Vec<T> rounded = (max * T(kLog2e / kGrid) + kMagic - kMagic) * kGrid;
    const auto large = (max > kLarge) | (max < -kLarge);
    shift = large ? zero : rounded;  // NaN stays NaN
    base = large ? (max == -kInfinity<T> ? zero : max) : zero;
  }
};

// The largest score itself, for weights that are rounded to half precision: then the largest weight
// is 1, which rounding leaves alone, and so the sum of a row keeps most of its digits.
template <class T>
struct LargestScore {
  Vec<T> base, shift{};

  explicit QKV_INLINE LargestScore(Vec<T> max) { base = max == -kInfinity<T> ? Vec<T>{} : max; }
};

// Subtracts base from `keys` vectors of scores, which are `step` elements apart.
template <class T>
void subtract_base(Vec<T> base, int64_t keys, int64_t step, T* scores) {
  if (!any_nonzero<T>(base)) return;
  for (int64_t j = 0; j < keys; ++j) store(scores + j * step, load(scores + j * step) - base);
}

// top = the maximum of `top` and of scores [keys x NV vectors], lane by lane.
template <class T, int NV>
QKV_INLINE void max_of_tile(int64_t keys, const T* scores, Vec<T> (&top)[NV]) {
  constexpr int W = kLanes<T>;
  // Two chains of maxima for each vector hide the latency of the instruction.
  Vec<T> other[NV];
  QKV_UNROLL
  for (int v = 0; v < NV; ++v) other[v] = top[v];
  int64_t j = 0;
  for (; j + 2 <= keys; j += 2) {
    QKV_UNROLL
    for (int v = 0; v < NV; ++v) {
      top[v] = max<T>(top[v], load(scores + (j * NV + v) * W));
      other[v] = max<T>(other[v], load(scores + ((j + 1) * NV + v) * W));
    }
  }
  QKV_UNROLL
  for (int v = 0; v < NV; ++v) {
    if (j < keys) top[v] = max<T>(top[v], load(scores + (j * NV + v) * W));
    top[v] = max<T>(top[v], other[v]);
  }
}

// The binary logarithm of the factor by which what was summed relative to the maximum `before` must
// be multiplied to be relative to `now`.
template <class T, class R>
QKV_INLINE Vec<T> log2_rescale(Vec<T> before, const R& now) {
  const R was(before);
  const Vec<T> factor = (was.base - now.base) * T(kLog2e) + (was.shift - now.shift);
  // Where nothing was summed before, the factor is 0, whatever the references: not 0 * inf.
  return before == -kInfinity<T> ? splat(-kInfinity<T>) : factor;
}

// The online softmax of scores [keys x NV vectors]: turns them into weights and updates the largest
// score max_state [lanes] and sums of the weights. rescale [lanes] is the factor by which
// everything that was summed before, relative to the former maximum, must be multiplied. Weights
// has
//   Reference  what weights are relative to
//   kMultiple  so many keys are taken in step, or a multiple, but for what is left of them
//   begin      is told the Reference of vector v
//   add<ROWS>  makes the weights of ROWS keys from the one with that number on, whose scores are
//              given, and adds them to the sums
template <int NV, class T, class Weights, int SUMS>
QKV_INLINE void online_softmax(int64_t keys, T* scores, T* max_state, T* const (&sum_states)[SUMS],
                               T* rescale, Weights& weights) {
  constexpr int W = kLanes<T>;
  Vec<T> top[NV], factor[NV], sums[SUMS][NV] = {};
  QKV_UNROLL
  for (int v = 0; v < NV; ++v) top[v] = load(max_state + v * W);
  max_of_tile<T, NV>(keys, scores, top);
  QKV_UNROLL
  for (int v = 0; v < NV; ++v) {
    const typename Weights::Reference now(top[v]);
    factor[v] = log2_rescale<T>(load(max_state + v * W), now);
    weights.begin(v, now, keys, scores);
    store(max_state + v * W, top[v]);
  }
  exp2<T>(factor);
  // An error of a sum is an error of the whole row, so sums are kept exact with short chains.
  constexpr int kMultiple = Weights::kMultiple, kChain = kSumChain;
  constexpr int kRows = std::max(kMultiple, kVectorsInStep / NV);
  static_assert(kRows % kMultiple == 0 && kChain % kRows == 0);
  for (int64_t begin = 0; begin < keys; begin += kChain) {
    Vec<T> chain[SUMS][NV] = {};
    const auto add = [&](int64_t j, auto rows) QKV_INLINE_LAMBDA {
      weights.template add<rows>(scores + (begin + j) * NV * W, begin + j, chain);
    };
    in_steps<kRows, kMultiple, 1>(std::min<int64_t>(keys - begin, kChain), add);
    QKV_UNROLL
    for (int s = 0; s < SUMS; ++s) {
      QKV_UNROLL
      for (int v = 0; v < NV; ++v) sums[s][v] += chain[s][v];
    }
  }
  QKV_UNROLL
  for (int v = 0; v < NV; ++v) {
    store(rescale + v * W, factor[v]);
    QKV_UNROLL
    for (int s = 0; s < SUMS; ++s)
      store(sum_states[s] + v * W, load(sum_states[s] + v * W) * factor[v] + sums[s][v]);
  }
}

// Weights exp(score - Reference), whose sum is added up.
template <class T, int NV>
struct TileWeights {
  using Reference = QKV_ISA::Reference<T>;
  static constexpr int kMultiple = 1;
  ShiftedExp<T> by[NV];

  QKV_INLINE void begin(int v, const Reference& now, int64_t keys, T* scores) {
    by[v] = ShiftedExp<T>(now.shift);
    subtract_base<T>(now.base, keys, NV * kLanes<T>, scores + v * kLanes<T>);
  }
  template <int ROWS>
  QKV_INLINE void add(T* scores, int64_t, Vec<T> (&sums)[1][NV]) const {
    constexpr int W = kLanes<T>;
    Vec<T> weight[ROWS * NV];
    QKV_UNROLL
    for (int i = 0; i < ROWS * NV; ++i) weight[i] = load(scores + i * W);
    exp<T>(weight, by);
    QKV_UNROLL
    for (int i = 0; i < ROWS * NV; ++i) {
      sums[0][i % NV] += weight[i];
      store(scores + i * W, weight[i]);
    }
  }
};

template <class T, int NV>
void softmax_vectors(int64_t keys, T* scores, T* max_state, T* sum_state, T* rescale) {
  TileWeights<T, NV> weights;
  online_softmax<NV>(keys, scores, max_state, {sum_state}, rescale, weights);
}
// The same for scores [keys x lanes] of one or two vectors of lanes.
template <class T>
void softmax_tile(int64_t lanes, int64_t keys, T* scores, T* max_state, T* sum_state, T* rescale) {
  (lanes == kLanes<T> ? softmax_vectors<T, 1> : softmax_vectors<T, 2>)(keys, scores, max_state,
                                                                       sum_state, rescale);
}

}  // namespace qkv::QKV_ISA
