// Loads and stores that convert between memory of any element type and vectors of its compute type
// (common/tensor.h): f32 for bf16, f16 and int8, else the type itself. And into vectors of double.
#pragma once

#include "kernels/simd/vec.h"

namespace qkv::QKV_ISA {

// As many bits as a vector of Half16 (isa/<name>/vec.h) has when it is widened.
typedef uint32_t HalfBits __attribute__((vector_size(kVectorBytes)));

QKV_INLINE Vec<float> widen_halves(Half16 x, BFloat16) {
  return (Vec<float>)(native_widen(x) << 16);
}
QKV_INLINE Vec<float> widen_halves(Half16 x, Float16) { return native_widen_f16(x); }

// The nearest bf16, ties to even, in the upper half of each lane; NaN stays NaN.
QKV_INLINE HalfBits rounded_bits(Vec<float> x) {
  const HalfBits bits = (HalfBits)x;
  return x == x ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000;
}
QKV_INLINE Half16 narrow_halves(Vec<float> x, BFloat16) {
  return __builtin_convertvector(rounded_bits(x) >> 16, Half16);
}
QKV_INLINE Half16 narrow_halves(Vec<float> x, Float16) { return native_narrow_f16(x); }

template <class E>
QKV_INLINE Vec<Compute<E>> load_wide(const E* p) {
  if constexpr (kIsHalf<E>) {
    Half16 x;
    std::memcpy(&x, p, sizeof x);
    return widen_halves(x, E{});
  } else if constexpr (std::is_same_v<E, int8_t>) {
    return __builtin_convertvector(native_widen(p, IntVec<float>{}), Vec<float>);
  } else {
    return load(p);
  }
}

// 2 W consecutive elements as two vectors, in the order in which they are cheapest to widen: those
// of bf16 by their places, even (half = 0) and odd (1), since a vector of pairs becomes either by
// one instruction; all others W after W. half = -1: the W elements at p, as they lie.
template <class E>
constexpr bool kInParts = std::is_same_v<E, BFloat16>;
// 2 W elements, two in each lane; and of such pairs the even or the odd ones.
QKV_INLINE HalfBits load_pairs(const BFloat16* p) {
  HalfBits pairs;
  std::memcpy(&pairs, p, sizeof pairs);
  return pairs;
}
QKV_INLINE Vec<float> part_of_pairs(int half, HalfBits pairs) {
  return (Vec<float>)(half == 0 ? pairs << 16 : pairs & 0xffff0000u);
}
template <int half, class E>
QKV_INLINE Vec<Compute<E>> load_part(const E* p) {
  if constexpr (kInParts<E> && half >= 0) {
    return part_of_pairs(half, load_pairs(p));
  } else {
    return load_wide(p + (half > 0 ? kLanes<Compute<E>> : 0));
  }
}

// Brings 2 W numbers at p into the order in which load_part<0> and load_part<1> would give them, if
// they were of type E in memory, and back.
template <class E, class T = Compute<E>>
QKV_INLINE void to_parts(T* p) {
  if constexpr (kInParts<E>) {
    const Vec<T> a = load(p), b = load(p + kLanes<T>);
    store(p, shuffle(a, b, [](int l) { return 2 * l; }));
    store(p + kLanes<T>, shuffle(a, b, [](int l) { return 2 * l + 1; }));
  }
}
template <class E, class T = Compute<E>>
QKV_INLINE void from_parts(T* p) {
  if constexpr (kInParts<E>) {
    constexpr int W = kLanes<T>;
    const Vec<T> a = load(p), b = load(p + W);
    store(p, shuffle(a, b, [](int l) { return l / 2 + l % 2 * W; }));
    store(p + W, shuffle(a, b, [](int l) { return (l + W) / 2 + l % 2 * W; }));
  }
}

template <class E>
QKV_INLINE void store_narrow(E* p, Vec<Compute<E>> v) {
  if constexpr (kIsHalf<E>) {
    const Half16 x = narrow_halves(v, E{});
    std::memcpy(p, &x, sizeof x);
  } else {
    store(p, v);
  }
}

// As many consecutive elements as there are doubles in a vector, converted from and to double. They
// are copied, because Clang takes a pointer to such a vector, whose size depends on T, for aligned,
// whatever its type says.
template <class T>
using PartOfVector __attribute__((vector_size(kLanes<double> * sizeof(T)))) = T;
template <class T>
QKV_INLINE Vec<double> load_double(const T* from) {
  PartOfVector<T> x;
  std::memcpy(&x, from, sizeof x);
  return __builtin_convertvector(x, Vec<double>);
}
template <class T>
QKV_INLINE void store_double(T* to, Vec<double> x) {
  const PartOfVector<T> narrow = __builtin_convertvector(x, PartOfVector<T>);
  std::memcpy(to, &narrow, sizeof narrow);
}

// x = f(x), where f takes and returns vectors of double.
template <class T, int N, class F>
QKV_INLINE void in_double(Vec<T> (&x)[N], const F& f) {
  for (int i = 0; i < N; ++i) {
    T numbers[kLanes<T>];
    store(numbers, x[i]);
    for (int part = 0; part < int(sizeof(double) / sizeof(T)); ++part) {
      T* const at = numbers + part * kLanes<double>;
      store_double(at, f(load_double(at)));
    }
    x[i] = load(numbers);
  }
}

}  // namespace qkv::QKV_ISA
