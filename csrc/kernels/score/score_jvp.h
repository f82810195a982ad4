// What the softmax makes of changes of scores (attention_jvp.h).
#pragma once

#include "kernels/operands/tile.h"
#include "kernels/simd/vec.h"

namespace qkv::QKV_ISA {

// Sets scores_jvp to 0 where scores are -inf: a hidden pair may have any number there. Both are
// [keys x lanes].
template <class T>
void clear_hidden_jvp(const Tile& tile, int64_t keys, const T* scores, T* scores_jvp) {
  for (int64_t i = 0; i < keys * tile.step; i += kLanes<T>)
    store(scores_jvp + i, load(scores + i) == -kInfinity<T> ? Vec<T>{} : load(scores_jvp + i));
}

// Multiplies scores_jvp [keys x lanes] by the weights [keys x lanes], and makes sum_jvp [lanes] =
// rescale [lanes] * sum_jvp + their sum over the keys. `rescale` is that of softmax_tile.
template <class T>
void weigh_jvp(const Tile& tile, int64_t keys, const T* weights, const T* rescale, T* scores_jvp,
               T* sum_jvp) {
  constexpr int64_t kChain = kSumChain;  // short chains keep the sum exact, as in softmax_tile
  for (int v = 0; v < tile.lanes; v += kLanes<T>) {
    Vec<T> sum{};
    for (int64_t begin = 0; begin < keys; begin += kChain) {
      Vec<T> chain{};
      for (int64_t j = begin; j < std::min(keys, begin + kChain); ++j) {
        T* const at = scores_jvp + j * tile.step + v;
        const Vec<T> weighed = load(weights + j * tile.step + v) * load(at);
        chain += weighed;
        store(at, weighed);
      }
      sum += chain;
    }
    store(sum_jvp + v, load(sum_jvp + v) * load(rescale + v) + sum);
  }
}

}  // namespace qkv::QKV_ISA
