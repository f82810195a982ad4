// The online softmax (score/softmax.h) where weights are multiplied as pairs of bf16: one sweep
// over the scores makes the weights, rounds and pairs them, and adds up both.
//
// The output is a sum of values times rounded weights, so it is divided by the sum of the rounded
// weights: then they add up to 1, and a common error of all of them cancels. The log-sum-exp has
// the sum of the weights as they were before.
#pragma once

#include "kernels/gemm/pairs.h"
#include "kernels/operands/operand.h"
#include "kernels/score/softmax.h"

namespace qkv::QKV_ISA {

// Weights exp(score - LargestScore), also as pairs of bf16, [pairs_in(keys) x lanes]; the last of
// an odd number is paired with 0. The first sum is that of the weights as they were before
// rounding, the second that of the rounded ones.
template <int NV>
struct PairWeights {
  using Reference = LargestScore<float>;
  static constexpr int kMultiple = 2;
  Pair* pairs;
  Vec<float> base[NV];

  QKV_INLINE void begin(int v, const Reference& now, int64_t, const float*) { base[v] = now.base; }
  template <int ROWS>
  QKV_INLINE void add(float* scores, int64_t key, Vec<float> (&sums)[2][NV]) const {
    constexpr int W = kLanes<float>;
    constexpr uint32_t kOnes = 0x3f803f80;  // two bf16
    ProductUnit::keep_awake(key * NV);
    Vec<float> weight[ROWS * NV];
    QKV_UNROLL
    for (int i = 0; i < ROWS * NV; ++i) weight[i] = load(scores + i * W) - base[i % NV];
    exp_of_negative<float>(weight);
    QKV_UNROLL
    for (int i = 0; i < ROWS * NV; ++i) store(scores + i * W, weight[i]);
    QKV_UNROLL
    for (int r = 0; r < ROWS; r += 2) {
      QKV_UNROLL
      for (int v = 0; v < NV; ++v) {
        const Vec<float> first = weight[r * NV + v];
        const Vec<float> second = r + 1 < ROWS ? weight[(r + 1) * NV + v] : Vec<float>{};
        const Vec<Pair> both = pair_up(first, second);
        store(pairs + ((key + r) / 2 * NV + v) * W, both);
        sums[0][v] += first + second;
        sums[1][v] = add_product(both, kOnes - Vec<Pair>{}, sums[1][v], Pair{});
      }
    }
  }
};

template <int NV>
void softmax_pair_vectors(int64_t keys, float* scores, float* max_state, float* sum_state,
                          float* rounded_sum, float* rescale, Pair* pairs) {
  PairWeights<NV> weights;
  weights.pairs = pairs;
  online_softmax<NV>(keys, scores, max_state, {sum_state, rounded_sum}, rescale, weights);
}
// What softmax_tile does, relative to LargestScore; besides, pairs [pairs_in(keys) x lanes] = the
// weights rounded to bf16, and their sum is added to rounded_sum [lanes].
inline void softmax_pairs(int64_t lanes, int64_t keys, float* scores, float* max_state,
                          float* sum_state, float* rounded_sum, float* rescale, Pair* pairs) {
  (lanes == kLanes<float>
       ? softmax_pair_vectors<1>
       : softmax_pair_vectors<2>)(keys, scores, max_state, sum_state, rounded_sum, rescale, pairs);
}

}  // namespace qkv::QKV_ISA
