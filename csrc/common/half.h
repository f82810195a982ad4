// bfloat16 (f32 without its lower 16 bits) and IEEE binary16, one number at a time: for the
// drivers, the ends of rows that fill no vector, and the reference. kernels/simd/halves.h does the
// same with vectors.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/tensor.h"

namespace qkv {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

// Two bf16 that are neighbours along the depth of a product (kernels/gemm/pairs.h): some
// instructions multiply both at once.
struct Pair {
  BFloat16 first, second;
};

template <class E>
constexpr bool kIsHalf = std::is_same_v<E, BFloat16> || std::is_same_v<E, Float16>;

// The C++ type of compute_type() in tensor.h; of int8 keys and values, too.
template <class E>
using Compute = std::conditional_t<std::is_same_v<E, double>, double, float>;

// Returns f(E{}) for the C++ type E that `dtype` stands for.
template <class F>
auto with_type(DType dtype, F f) {
  if (dtype == DType::f32) return f(float{});
  if (dtype == DType::f64) return f(double{});
  if (dtype == DType::bf16) return f(BFloat16{});
  return f(Float16{});
}

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float widen(int8_t x) { return x; }
inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(BFloat16 x) { return float_of_bits(uint32_t(x.bits) << 16); }
inline float widen(Float16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return float_of_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // Exponent and fraction are shifted to their places in f32. The exponent's bias is 127 in f32 and
  // 15 in f16, and the product by 2^112 makes up for that, for subnormal numbers too.
  const float value = float_of_bits(magnitude << 13) * 0x1p112f;
  return float_of_bits(sign | bits_of(value));
}

// Rounds to the nearest, ties to even; NaN stays NaN.
template <class E>
E narrow(float x);
template <class E>
E narrow(double x);

template <>
inline float narrow<float>(float x) {
  return x;
}
template <>
inline double narrow<double>(double x) {
  return x;
}
template <>
inline BFloat16 narrow<BFloat16>(float x) {
  const uint32_t bits = bits_of(x);
  if (x != x) return {uint16_t(bits >> 16 | 0x40)};
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
template <>
inline Float16 narrow<Float16>(float x) {
  const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffff;
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  if (magnitude > 0x7f800000) return {uint16_t(sign | 0x7e00)};
  if (magnitude >= 0x477ff000) return {uint16_t(sign | 0x7c00)};  // 65520 rounds to infinity
  if (magnitude < 0x38800000) {  // subnormal in f16: a sum with 1/2 is rounded at their last place
    const uint32_t sum = bits_of(float_of_bits(magnitude) + 0.5f);
    return {uint16_t(sign | (sum - 0x3f000000))};
  }
  return {uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13))};
}

}  // namespace qkv
