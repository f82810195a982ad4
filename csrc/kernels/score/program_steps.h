// How a step of a score program goes through the vectors of its operands and its result.
#pragma once

#include "kernels/simd/exp_of.h"
#include "kernels/simd/halves.h"
#include "kernels/simd/log.h"
#include "kernels/simd/vec.h"
#include "program/compiled.h"

namespace qkv::QKV_ISA {

// Where the numbers of a result are, in bytes: row r and vector v of lanes begin r * row + v * lane
// bytes after `data`. A result that is the same in all rows, or in all lanes, has a 0 there.
struct StepData {
  char* data = nullptr;
  int64_t row = 0, lane = 0;

  template <class T>
  QKV_INLINE T* at(int64_t r, int64_t v) const {
    return reinterpret_cast<T*>(data + r * row + v * lane);
  }
};

// How many rows and vectors a result has: 1 of what it does not depend on. There are two vectors at
// most.
struct StepSize {
  int64_t rows, vectors;
  bool by_lane;
};

// The beginning of a lambda that returns vectors. It captures, even nothing: GCC gives a function
// to which one without captures converts the default instruction set.
#define QKV_VECTORS(...) [&](__VA_ARGS__) QKV_INLINE_LAMBDA

// Integers and booleans are vectors of the same size as reals: so many bits.
template <class T>
using IntLane = typename VecTraits<T>::Integer;
template <class T>
QKV_INLINE IntVec<T> load_integers(const T* p) {
  return (IntVec<T>)load(p);
}

// Results of 64 bits wrap as those of 32 do.
template <class T>
QKV_INLINE IntVec<T> wrap(IntVec<T> x) {
  if constexpr (sizeof(T) == 4) return x;
  constexpr IntLane<T> kSign = IntLane<T>(1) << 31;
  return ((x & 0xffffffff) ^ kSign) - kSign;
}

// Calls each(r, v) for all rows and vectors; the vectors of a row are constants.
template <class Each>
QKV_INLINE void for_each_vector(const StepSize& size, const Each& each) {
  if (size.vectors == 1) {
    for (int64_t r = 0; r < size.rows; ++r) each(r, 0);
  } else {
    for (int64_t r = 0; r < size.rows; ++r) {
      each(r, 0);
      each(r, 1);
    }
  }
}

// to = f(a, b, c), where f takes vectors of reals, or of integers if as_integers. StepData are
// copies, since any store could change those in memory.
template <class T, bool as_integers, class F>
QKV_INLINE void each_vector(const StepSize& size, StepData to, StepData a, StepData b, StepData c,
                            const F& f) {
  const auto read = [&](const StepData& from, int64_t r, int64_t v) QKV_INLINE_LAMBDA {
    if constexpr (as_integers)
      return load_integers(from.at<T>(r, v));
    else
      return load(from.at<T>(r, v));
  };
  for_each_vector(size, [&](int64_t r, int64_t v) QKV_INLINE_LAMBDA {
    store(to.at<T>(r, v), (Vec<T>)f(read(a, r, v), read(b, r, v), read(c, r, v)));
  });
}

// to = f(a), where f changes kVectorsInStep vectors in place.
template <class T, class F>
QKV_INLINE void each_in_step(const StepSize& size, StepData to, StepData a, const F& f) {
  constexpr int N = kVectorsInStep;
  const int64_t count = size.rows * size.vectors, more = size.vectors - 1;
  for (int64_t n = 0; n < count; n += N) {
    Vec<T> x[N];
    for (int i = 0; i < N; ++i) {
      const int64_t at = std::min(n + i, count - 1);
      x[i] = load(a.at<T>(at >> more, at & more));
    }
    f(x);
    for (int i = 0; i < N && n + i < count; ++i)
      store(to.at<T>((n + i) >> more, (n + i) & more), x[i]);
  }
}

// to = f(a, b), lane by lane, in double: what vectors have no instruction for.
template <class T, bool as_integers, class F>
QKV_INLINE void each_lane(const StepSize& size, StepData to, StepData a, StepData b, const F& f) {
  using L = std::conditional_t<as_integers, IntLane<T>, T>;
  for (int64_t r = 0; r < size.rows; ++r)
    for (int64_t v = 0; v < size.vectors; ++v) {
      L x[kLanes<T>], y[kLanes<T>];
      std::memcpy(x, a.at<T>(r, v), sizeof x);
      std::memcpy(y, b.at<T>(r, v), sizeof y);
      for (int l = 0; l < kLanes<T>; ++l) {
        const double z = f(double(x[l]), double(y[l]));
        x[l] = as_integers ? L(int32_t(int64_t(z))) : L(z);  // -2^31 // -1 wraps to -2^31
      }
      std::memcpy(to.at<T>(r, v), x, sizeof x);
    }
}

// NaN for x < 0.
QKV_INLINE Vec<double> log_of(Vec<double> x) {
  Vec<double> y[] = {x};
  log(y);
  return x < 0 ? splat(std::numeric_limits<double>::quiet_NaN()) : y[0];
}

// Op::to_real and Op::to_integer, of type `from`.
template <class T>
void convert(program::Type to_type, program::Type from, const StepSize& size, const StepData& to,
             const StepData& a) {
  using V = IntVec<T>;
  const bool negates = from == program::Type::boolean;  // true is all ones, which is -1
  if (to_type == program::Type::real)
    each_vector<T, true>(
        size, to, a, a, a,
        QKV_VECTORS(V p, V, V) { return __builtin_convertvector(negates ? -p : p, Vec<T>); });
  else if (negates)
    each_vector<T, true>(size, to, a, a, a, QKV_VECTORS(V p, V, V) { return -p; });
  else
    each_vector<T, false>(
        size, to, a, a, a, QKV_VECTORS(Vec<T> p, Vec<T>, Vec<T>) {
          // What is no number of 32 bits, or none at all, is the smallest one, as in torch.
          const auto fits = max<T>(p, -p) < splat(T(0x1p31));
          return fits ? __builtin_convertvector(p, V) : V{} + IntLane<T>(INT32_MIN);
        });
}

}  // namespace qkv::QKV_ISA
