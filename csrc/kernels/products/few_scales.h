// The scales of int8 (Problem::key_scale) in planes of few rows, where they multiply scores and
// weights instead of elements.
#pragma once

#include "kernels/products/few_rows.h"

namespace qkv::QKV_ISA {

// Fetches the scales of keys [key, key + keys), if there are any. Were they read ahead instead,
// int8 from memory would take 1.02 to 1.05 times as long, and 1.1 to 1.2 in pages of 16 rows (Zen
// 5). It is inlined as look_up_pages is.
template <class K>
QKV_INLINE void fetch_scales(const KeyRows<K>& places, int64_t key, int64_t keys) {
  const RowPlaces<float>& of = places.scales();
  const int64_t step = of.row == 0 ? keys : of.row == 1 ? int64_t(kCacheLine / sizeof(float)) : 1;
  of.for_each_piece(key, keys, [&](const float* scale, int64_t count, int64_t) QKV_INLINE_LAMBDA {
    for (int64_t i = 0; i < count; i += step) __builtin_prefetch(scale + i * of.row);
  });
}

// Calls put(at, scale) for each of `rows` rows and each vector of scales of keys [key, key +
// keys) of `places`, which has `seqlen` keys; `at` is where their scores are in [rows x keys].
// Beyond the last key the scales are 0. scales [kFewStep] is scratch memory.
template <class K, class T, class F>
QKV_INLINE void for_each_scale(int rows, const KeyRows<K>& places, int64_t key, int64_t keys,
                               T* scales, const F& put) {
  const int64_t end = padded<T>(keys);
  const RowPlaces<float>& of = places.scales();
  of.for_each_piece(key, keys, [&](const float* scale, int64_t count, int64_t j) {
    if (of.row == 1)
      std::copy_n(scale, count, scales + j);
    else
      for (int64_t i = 0; i < count; ++i) scales[j + i] = scale[i * of.row];
  });
  for (int64_t j = keys; j < end; ++j) scales[j] = 0;
  for (int r = 0; r < rows; ++r)
    for (int64_t j = 0; j < end; j += kLanes<T>) put(r * kFewStep + j, load(scales + j));
}

}  // namespace qkv::QKV_ISA
