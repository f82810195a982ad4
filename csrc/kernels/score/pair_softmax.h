// The online softmax (score/softmax.h) where weights are multiplied as pairs of bf16: one sweep
// over the scores makes the weights, rounds and pairs them, and adds up both.
//
// The output is a sum of values times rounded weights, so it is divided by the sum of the rounded
// weights: then they add up to 1, and a common error of all of them cancels. The log-sum-exp has
// the sum of the weights as they were before.
#pragma once

#ifndef QKV_ISA  // this header is opened by itself (kernels/simd/vec.h)
#include "isa/avx512bf16/vec.h"
#endif

#include "kernels/gemm/pairs.h"
#include "kernels/score/softmax.h"

namespace qkv::QKV_ISA {

// The sums of the weights of NV vectors of lanes, before and after rounding.
template <int NV>
struct PairSums {
  Vec<float> exact[NV] = {}, rounded[NV] = {};

  // Adds the two weights of a pair, in lanes `v`.
  QKV_INLINE void add(int v, Vec<float> first, Vec<float> second, Vec<Pair> pairs) {
    constexpr uint32_t kOnes = 0x3f803f80;  // two bf16
    exact[v] += first + second;
    rounded[v] = add_product(pairs, kOnes - Vec<Pair>{}, rounded[v], Pair{});
  }
  QKV_INLINE void add(const PairSums& other) {
    QKV_UNROLL
    for (int v = 0; v < NV; ++v) exact[v] += other.exact[v], rounded[v] += other.rounded[v];
  }
};

// Turns the scores of ROWS keys into weights, exp(score - base), in place and as pairs; the last of
// an odd number is paired with 0. Adds them to `sums`.
template <int NV, int ROWS>
QKV_INLINE void softmax_pair_rows(float* scores, const Vec<float> (&base)[NV], Pair* pairs,
                                  PairSums<NV>& sums) {
  constexpr int W = kLanes<float>;
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
      store(pairs + (r / 2 * NV + v) * W, both);
      sums.add(v, first, second, both);
    }
  }
}

// What softmax_tile does, relative to LargestScore; besides, pairs [pairs_in(keys) x lanes] = the
// weights rounded to bf16, and their sum is added to rounded_sum [lanes], as that of the weights to
// sum_state. (pair_up)
template <int NV>
void softmax_pairs(int64_t keys, float* scores, float* max_state, float* sum_state,
                   float* rounded_sum, float* rescale, Pair* pairs) {
  constexpr int W = kLanes<float>;
  Vec<float> top[NV], base[NV], factor[NV];
  QKV_UNROLL
  for (int v = 0; v < NV; ++v) top[v] = load(max_state + v * W);
  max_of_tile<float, NV>(keys, scores, top);
  QKV_UNROLL
  for (int v = 0; v < NV; ++v) {
    const LargestScore<float> now(top[v]);
    base[v] = now.base;
    factor[v] = log2_rescale<float>(load(max_state + v * W), now);
    store(max_state + v * W, top[v]);
  }
  exp2<float>(factor);
  // Keys in step, an even number of them, and keys of a short chain of additions (softmax_tile).
  constexpr int kRows = std::max(2, kVectorsInStep / NV), kChain = 16;
  static_assert(kRows % 2 == 0 && kChain % kRows == 0);
  PairSums<NV> sums;
  for (int64_t begin = 0; begin < keys; begin += kChain) {
    const int64_t end = std::min(keys, begin + kChain);
    PairSums<NV> chain;
    int64_t j = begin;
    const auto run = [&](auto rows) QKV_INLINE_LAMBDA {
      softmax_pair_rows<NV, rows>(scores + j * NV * W, base, pairs + j / 2 * NV * W, chain);
      j += rows;
    };
    while (j + kRows <= end) run(std::integral_constant<int, kRows>());
    while (j + 2 <= end) run(std::integral_constant<int, 2>());
    if (j < end) run(std::integral_constant<int, 1>());
    sums.add(chain);
  }
  QKV_UNROLL
  for (int v = 0; v < NV; ++v) {
    store(rescale + v * W, factor[v]);
    store(sum_state + v * W, load(sum_state + v * W) * factor[v] + sums.exact[v]);
    store(rounded_sum + v * W, load(rounded_sum + v * W) * factor[v] + sums.rounded[v]);
  }
}

}  // namespace qkv::QKV_ISA
