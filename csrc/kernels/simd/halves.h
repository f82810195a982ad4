// Loads and stores that convert between memory of any element type and vectors of its compute type
// (attention.h): f32 for bf16 and f16, else the type itself.
#pragma once

#include "kernels/simd/vec.h"

namespace qkv::QKV_ISA {

// As many numbers of 16 bits as a vector has lanes of f32.
typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));
typedef uint32_t HalfBits __attribute__((vector_size(kVectorBytes)));

QKV_INLINE Vec<float> widen_halves(Halves x, BFloat16) {
  return (Vec<float>)(native_widen(x) << 16);
}
QKV_INLINE Vec<float> widen_halves(Halves x, Float16) { return native_widen_f16(x); }

// Rounds to the nearest bf16, ties to even; NaN stays NaN.
QKV_INLINE Halves narrow_halves(Vec<float> x, BFloat16) {
  const HalfBits bits = (HalfBits)x;
  const HalfBits rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return __builtin_convertvector(x == x ? rounded : bits >> 16 | 0x40, Halves);
}
QKV_INLINE Halves narrow_halves(Vec<float> x, Float16) { return native_narrow_f16(x); }

template <class E>
QKV_INLINE Vec<Compute<E>> load_wide(const E* p) {
  if constexpr (kIsHalf<E>) {
    Halves x;
    std::memcpy(&x, p, sizeof x);
    return widen_halves(x, E{});
  } else {
    return load(p);
  }
}

template <class E>
QKV_INLINE void store_narrow(E* p, Vec<Compute<E>> v) {
  if constexpr (kIsHalf<E>) {
    const Halves x = narrow_halves(v, E{});
    std::memcpy(p, &x, sizeof x);
  } else {
    store(p, v);
  }
}

}  // namespace qkv::QKV_ISA
