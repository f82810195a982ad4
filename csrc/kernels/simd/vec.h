// Vectors of kVectorBytes (isa/<name>/vec.h), by the compiler's vector extension: +, -, *, < and
// their like are operators of the language, and work lane by lane.
#pragma once

// isa/<name>/kernels.cpp chooses the instruction set before it includes any kernel. A kernel header
// that is opened by itself, in an editor or by tests/headers.sh, is generic code.
#ifndef QKV_ISA
#include "isa/generic/vec.h"
#endif
#include "kernels/fixed_bits.h"

namespace qkv::QKV_ISA {

// Vectors of T, whose lanes hold an Element: of a Pair, its bits (kernels/gemm/pairs.h).
template <class T, class Element = T>
struct VecTraits {
  using Integer = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  typedef Element Vec __attribute__((vector_size(kVectorBytes)));
  typedef Element Unaligned
      __attribute__((vector_size(kVectorBytes), aligned(alignof(T)), may_alias));
  typedef Integer Int __attribute__((vector_size(kVectorBytes)));
};

template <class T>
using Vec = typename VecTraits<T>::Vec;
template <class T>
using IntVec = typename VecTraits<T>::Int;

template <class T>
constexpr int kLanes = kVectorBytes / sizeof(T);

// Whether products can take half a vector (kernels/gemm/tile_gemm.h), and whether this CPU gains by
// it. No bit depends on it.
#ifdef QKV_SPLITS_VECTORS
constexpr bool kHasHalves = !kFixedBits;
#else
constexpr bool kHasHalves = false;
#define QKV_SPLITS_VECTORS false
#endif
template <class T>
struct HalfTraits {
  typedef T Vec __attribute__((vector_size(kVectorBytes / 2)));
};
template <class T>
using HalfVec = typename HalfTraits<T>::Vec;

template <class T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

template <class T>
QKV_INLINE Vec<T> load(const T* p) {
  return *reinterpret_cast<const typename VecTraits<T>::Unaligned*>(p);
}

template <class T>
QKV_INLINE void store(T* p, Vec<T> v) {
  *reinterpret_cast<typename VecTraits<T>::Unaligned*>(p) = v;
}

template <class T>
QKV_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};  // not x + 0, which would turn -0.0 into 0.0
}

// Calls f(j, N) from j = 0 on, N further each time, as often as `count` has room for, and then the
// same with each of Fewer: N are constants.
template <int N, int... Fewer, class F>
QKV_INLINE void in_steps(int64_t count, const F& f, int64_t j = 0) {
  for (; j + N <= count; j += N) f(j, std::integral_constant<int, N>());
  if constexpr (sizeof...(Fewer) > 0) in_steps<Fewer...>(count, f, j);
}

// f(0), f(1), ... f(N - 1), constants.
template <int N, int I = 0, class F>
QKV_INLINE void for_each_constant(const F& f) {
  if constexpr (I < N) {
    f(std::integral_constant<int, I>());
    for_each_constant<N, I + 1>(f);
  }
}

// Returns x, kept in a register: without this the compiler would load it again for every use.
template <class V>
QKV_INLINE V in_register(V x) {
  asm("" : QKV_VECTOR_REGISTER(x));
  return x;
}

// Lane l of the result is lane from(l) of a followed by b. `from` is a lambda without captures, so
// that every call of it is a constant.
template <class V, class From, int... lane>
QKV_INLINE V shuffle_lanes(V a, V b, From from, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(a, b, from(lane)...);
}
template <class V, class From>
QKV_INLINE V shuffle(V a, V b, From from) {
  return shuffle_lanes(a, b, from, std::make_integer_sequence<int, sizeof(V) / sizeof(a[0])>());
}

// The larger of each lane of a and b; that of b if either is NaN.
template <class T>
QKV_INLINE Vec<T> max(Vec<T> a, Vec<T> b) {
  return native_max(a, b);
}

// a * b + c. It is for the compiler to round it once or twice, but where bits are fixed, it is
// once.
template <class T>
QKV_INLINE Vec<T> multiply_add(Vec<T> a, Vec<T> b, Vec<T> c) {
  if constexpr (kFixedBits) return native_fma(a, b, c);
  return a * b + c;
}

template <class T>
QKV_INLINE HalfVec<T> multiply_add(HalfVec<T> a, HalfVec<T> b, HalfVec<T> c) {
  return a * b + c;
}

// x, a number or a vector; where bits are fixed, 0 in place of -0. A sum of products is -0 where
// the only one that is not 0 was too small and negative, and 0 again once a hidden key has been
// added, which depends on what else a tile has.
template <class V>
QKV_INLINE V without_negative_zero(V x) {
  if constexpr (kFixedBits) return x + V{};
  return x;
}

// Lane 0 | lane 1 | ... of bits.
template <int h = kLanes<double> / 2>
QKV_INLINE int64_t or_lanes(IntVec<double> bits) {
  if constexpr (h > 0)
    return or_lanes<h / 2>(bits | shuffle(bits, bits, [](int l) { return l ^ h; }));
  return bits[0];
}

template <class T>
QKV_INLINE bool any_nonzero(Vec<T> v) {
  return or_lanes((IntVec<double>)(v != 0)) != 0;
}

}  // namespace qkv::QKV_ISA
