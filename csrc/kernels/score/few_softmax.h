// The online softmax (score/softmax.h) of planes of few rows, whose scores are [rows x keys]: keys
// are in the lanes, and only the largest score and the sum of a row go across lanes, once a block.
#pragma once

#include "kernels/products/few_pairs.h"
#include "kernels/score/softmax.h"
#include "kernels/simd/exp.h"
#include "kernels/simd/transpose.h"

namespace qkv::QKV_ISA {

// How many vectors' exponentials are computed in step: of those of a full block none is left over.
template <class T>
constexpr int few_in_step() {
  int n = kVectorsInStep;
  while (kFewKeys / kLanes<T> % n) --n;
  return n;
}
// The scores of a row go through the softmax in steps of so many keys.
template <class T>
constexpr int64_t kFewSoftmaxKeys = few_in_step<T>() * kLanes<T>;

// The largest of `keys` scores, a multiple of W, lane by lane.
template <class T>
QKV_INLINE Vec<T> max_of_row(int64_t keys, const T* scores) {
  Vec<T> top = load(scores);
  for (int64_t j = kLanes<T>; j < keys; j += kLanes<T>) top = max<T>(top, load(scores + j));
  return top;
}

// Turns `keys` scores of one row, a multiple of kFewSoftmaxKeys, into weights, exp(score - base) /
// 2^shift; returns their sum, lane by lane.
template <class T>
QKV_INLINE Vec<T> weights_of_row(int64_t keys, T* scores, T base, const ShiftedExp<T>& shift) {
  constexpr int W = kLanes<T>, N = few_in_step<T>();
  if (base != 0)
    for (int64_t j = 0; j < keys; j += W) store(scores + j, load(scores + j) - base);
  const ShiftedExp<T> by[] = {shift};
  Vec<T> sum{};
  for (int64_t j = 0; j < keys; j += N * W) {
    Vec<T> weight[N];
    QKV_UNROLL
    for (int i = 0; i < N; ++i) weight[i] = load(scores + j + i * W);
    exp<T>(weight, by);
    QKV_UNROLL
    for (int i = 0; i < N; ++i) store(scores + j + i * W, weight[i]);
    QKV_UNROLL
    for (int i = 1; i < N; ++i) weight[0] += weight[i];
    sum += weight[0];
  }
  return sum;
}

// The sum of `keys` weights of one row, in the order in which a tile adds them up: where bits are
// fixed.
template <class T>
T sum_of_row(int64_t keys, const T* weights) {
  T sum = 0;
  for (int64_t begin = 0; begin < keys; begin += kSumChain) {
    T chain = 0;
    for (int64_t j = begin; j < std::min<int64_t>(keys, begin + kSumChain); ++j)
      chain += weights[j];
    sum += chain;
  }
  return sum;
}

// What softmax_tile does, for scores [rows x keys] and weights relative to R. Beyond the last key
// it writes weights of 0, up to a multiple of kFewSoftmaxKeys. max_state, sum_state and rescale
// [lanes] are those of softmax_tile.
template <class R, class T>
void softmax_few(const Tile& tile, int64_t keys, T* scores, T* max_state, T* sum_state,
                 T* rescale) {
  constexpr int W = kLanes<T>;
  const int64_t end = (keys + kFewSoftmaxKeys<T> - 1) / kFewSoftmaxKeys<T> * kFewSoftmaxKeys<T>;
  for (int r = 0; r < tile.rows; ++r)
    for (int64_t j = keys; j < end; ++j) scores[r * kFewStep + j] = -kInfinity<T>;
  for (int v = 0; v < tile.lanes; v += W, scores += W * kFewStep) {
    const int rows = std::min(W, tile.rows - v);
    Vec<T> of_row[W];
    for (int r = 0; r < W; ++r)
      of_row[r] = r < rows ? max_of_row(end, scores + r * kFewStep) : splat(-kInfinity<T>);
    const Vec<T> before = load(max_state + v), top = max<T>(before, max_lanes<T>(of_row));
    const R now(top);
    const ShiftedExp<T> by(now.shift);
    Vec<T> factor[] = {log2_rescale<T>(before, now)};
    exp2<T>(factor);
    T base[W], magic[W], low[W];
    store(base, now.base), store(magic, by.magic), store(low, by.low);
    for (int r = 0; r < W; ++r) {
      ShiftedExp<T> of;
      of.magic = splat(magic[r]), of.low = splat(low[r]);
      of_row[r] = r < rows ? weights_of_row(end, scores + r * kFewStep, base[r], of) : Vec<T>{};
    }
    store(max_state + v, top);
    store(rescale + v, factor[0]);
    T sums[W] = {};
    for (int r = 0; kFixedBits && r < rows; ++r) sums[r] = sum_of_row(keys, scores + r * kFewStep);
    const Vec<T> added = kFixedBits ? load(sums) : sum_lanes<T>(of_row);
    store(sum_state + v, load(sum_state + v) * factor[0] + added);
  }
}

// own_sum [lanes] = rescale * own_sum + the sums of weights [rows x keys], rounded to bf16: what an
// output of rounded weights is divided by (pair_softmax.h).
inline void add_rounded_weights(const Tile& tile, int64_t keys, const float* weights,
                                const float* rescale, float* own_sum) {
  constexpr int W = kLanes<float>;
  for (int v = 0; v < tile.lanes; v += W) {
    Vec<float> of_row[W] = {};
    for (int r = 0; r < std::min(W, tile.rows - v); ++r, weights += kFewStep)
      for (int64_t j = 0; j < keys; j += W)
        of_row[r] += (Vec<float>)(rounded_bits(load(weights + j)) & 0xffff0000u);
    store(own_sum + v, load(own_sum + v) * load(rescale + v) + sum_lanes<float>(of_row));
  }
}

// tile [keys x lanes], with tile.step elements from key to key, = scores [rows x keys], 0 in lanes
// without a row; and back.
template <class T>
void few_to_tile(const Tile& tile, int64_t keys, const T* scores, T* to) {
  constexpr int W = kLanes<T>;
  for (int v = 0; v < tile.lanes; v += W)
    for (int64_t j = 0; j < keys; j += W)
      transpose_square<T>(
          [&](int r) QKV_INLINE_LAMBDA {
            return v + r < tile.rows ? load(scores + (v + r) * kFewStep + j) : Vec<T>{};
          },
          [&](int i, Vec<T> of_key) QKV_INLINE_LAMBDA {
            if (j + i < keys) store(to + (j + i) * tile.step + v, of_key);
          });
}
template <class T>
void few_from_tile(const Tile& tile, int64_t keys, const T* from, T* scores) {
  constexpr int W = kLanes<T>;
  for (int v = 0; v < tile.lanes; v += W)
    for (int64_t j = 0; j < keys; j += W)
      transpose_square<T>(
          [&](int i)
              QKV_INLINE_LAMBDA { return load(from + std::min(j + i, keys - 1) * tile.step + v); },
          [&](int r, Vec<T> of_row) QKV_INLINE_LAMBDA {
            if (v + r < tile.rows) store(scores + (v + r) * kFewStep + j, of_row);
          });
}

// to [keys x lanes] = the scores of keys [key, key + keys) with the queries of pack_few_queries.
template <class E, class T = Compute<E>>
void few_scores_of_tile(const Tile& tile, const KeyRows<E>& rows, int64_t key, int64_t keys,
                        const T* query, T* to) {
  T block[kFewRows * kFewStep];
  for (int64_t j = 0, count; j < keys; j += count) {
    count = std::min(kFewKeys, keys - j);
    const E* places[kFewKeys + kFewPlaces];
    few_places(rows, key + j, count, places);
    few_scores<E>(tile.rows, rows.dim(), {places, count}, query, block);
    few_to_tile(tile, count, block, to + j * tile.step);
  }
}

}  // namespace qkv::QKV_ISA
