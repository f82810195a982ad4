// The scales of int8 (Problem::key_scale) in planes of few rows, where they multiply scores and
// weights instead of elements.
#pragma once

#include "kernels/products/few_rows.h"

namespace qkv::QKV_ISA {

// to [rows x keys] = from times the scales of keys [key, key + keys) of `places`, which has
// `seqlen` keys. Where `from` are sums, their rests are (kHasRests), too. scales [kFewStep] is
// scratch memory.
template <bool kSums, class K, class T>
void times_scales(int rows, const KeyRows<K>& places, int64_t key, int64_t keys, int64_t seqlen,
                  T* scales, const T* from, T* to) {
  const int64_t end = padded<T>(keys);
  const RowPlaces<float>& of = places.scales();
  of.for_each_piece(key, keys, [&](const float* scale, int64_t count, int64_t j) {
    if (of.row == 1)
      std::copy_n(scale, count, scales + j);
    else
      for (int64_t i = 0; i < count; ++i) scales[j + i] = scale[i * of.row];
  });
  const int64_t next = std::min(kFewKeys, seqlen - key - keys);
  const int64_t step = of.row == 1 ? int64_t(kCacheLine / sizeof(float)) : 1;
  of.for_each_piece(key + keys, next, [&](const float* scale, int64_t count, int64_t) {
    for (int64_t i = 0; i < count; i += step) __builtin_prefetch(scale + i * of.row);
  });
  for (int64_t j = keys; j < end; ++j) scales[j] = 0;
  for (int r = 0; r < rows; ++r)
    for (int64_t j = 0; j < end; j += kLanes<T>) {
      const int64_t at = r * kFewStep + j;
      const Vec<T> scale = load(scales + j);
      if constexpr (kSums)
        store(to + at, load(from + at) * scale + load(from + kFewScores + at) * scale);
      else
        store(to + at, load(from + at) * scale);
    }
}

}  // namespace qkv::QKV_ISA
