// How rows become int8: number times scale is about what they were.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace qkv::ops {

// -128 is not used, so that a row and its negative have the same scale.
constexpr float kLargestInt8 = 127;

// `count` elements of type E, `stride` bytes apart, anywhere in memory.
template <class E>
struct FloatRow {
  const char* data;
  int64_t stride, count;

  float operator[](int64_t i) const {
    E x;
    std::memcpy(&x, data + i * stride, sizeof x);
    return float(x);
  }
};

// The scale that makes the largest number of a row 127. NaN for a row that is not finite: every one
// of its numbers will be NaN.
template <class E>
float scale_of(const FloatRow<E>& row) {
  float largest = 0;
  bool is_finite = true;
  for (int64_t i = 0; i < row.count; ++i) {
    const float magnitude = std::abs(row[i]);
    largest = std::max(largest, magnitude);
    is_finite &= magnitude < INFINITY;
  }
  return is_finite ? largest / kLargestInt8 : NAN;
}

// to[i * stride] = row[i] / scale, to the nearest integer, ties to even, and from -127 to 127.
// Where the quotient is NaN, 0.
template <class E>
void quantize(const FloatRow<E>& row, float scale, int8_t* to, int64_t stride) {
  for (int64_t i = 0; i < row.count; ++i) {
    const float x = std::nearbyint(row[i] / scale);
    const float clamped = std::clamp(x, -kLargestInt8, kLargestInt8);
    to[i * stride] = x == x ? int8_t(clamped) : int8_t(0);
  }
}

}  // namespace qkv::ops
