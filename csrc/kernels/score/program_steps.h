// What a step of a score program does with vectors (program/instruction.h has the meaning of each).
#pragma once

#include "kernels/simd/exp.h"
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

// How many rows and vectors a result has: 1 of what it does not depend on.
struct StepSize {
  int64_t rows, vectors;
};

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

// to = f(a, b, c), where f takes vectors of reals, or of integers if as_integers.
template <class T, bool as_integers, class F>
QKV_INLINE void each_vector(const StepSize& size, const StepData& to, const StepData& a,
                            const StepData& b, const StepData& c, const F& f) {
  const auto read = [&](const StepData& from, int64_t r, int64_t v) QKV_INLINE_LAMBDA {
    if constexpr (as_integers)
      return load_integers(from.at<T>(r, v));
    else
      return load(from.at<T>(r, v));
  };
  for (int64_t r = 0; r < size.rows; ++r)
    for (int64_t v = 0; v < size.vectors; ++v)
      store(to.at<T>(r, v), (Vec<T>)f(read(a, r, v), read(b, r, v), read(c, r, v)));
}

// to = f(a), where f changes kVectorsInStep vectors in place.
template <class T, class F>
QKV_INLINE void each_in_step(const StepSize& size, const StepData& to, const StepData& a,
                             const F& f) {
  constexpr int N = kVectorsInStep;
  const int64_t count = size.rows * size.vectors;
  for (int64_t n = 0; n < count; n += N) {
    Vec<T> x[N];
    for (int i = 0; i < N; ++i) {
      const int64_t at = std::min(n + i, count - 1);
      x[i] = load(a.at<T>(at / size.vectors, at % size.vectors));
    }
    f(x);
    for (int i = 0; i < N && n + i < count; ++i)
      store(to.at<T>((n + i) / size.vectors, (n + i) % size.vectors), x[i]);
  }
}

// to = f(a, b), lane by lane, in double: what vectors have no instruction for.
template <class T, bool as_integers, class F>
QKV_INLINE void each_lane(const StepSize& size, const StepData& to, const StepData& a,
                          const StepData& b, const F& f) {
  using L = std::conditional_t<as_integers, IntLane<T>, T>;
  for (int64_t r = 0; r < size.rows; ++r)
    for (int64_t v = 0; v < size.vectors; ++v) {
      L x[kLanes<T>], y[kLanes<T>];
      std::memcpy(x, a.at<T>(r, v), sizeof x);
      std::memcpy(y, b.at<T>(r, v), sizeof y);
      for (int l = 0; l < kLanes<T>; ++l) x[l] = L(f(double(x[l]), double(y[l])));
      std::memcpy(to.at<T>(r, v), x, sizeof x);
    }
}

template <class T, int N>
QKV_INLINE void exp_of(Vec<T> (&x)[N]) {
  // Half of the result fits wherever the result does.
  const ShiftedExp<T> by[] = {ShiftedExp<T>(splat(T(1)))};
  constexpr T kMost = sizeof(T) == 4 ? T(88.7228394) : T(709.782712893384);
  IntVec<T> above[N];
  QKV_UNROLL
  for (int i = 0; i < N; ++i) above[i] = x[i] > kMost;
  QKV_UNROLL
  for (int i = 0; i < N; ++i) x[i] = above[i] ? splat(kMost) : x[i];
  exp<T>(x, by);
  QKV_UNROLL
  for (int i = 0; i < N; ++i) x[i] = above[i] ? splat(kInfinity<T>) : x[i] * 2;
}

template <class T, int N>
QKV_INLINE void log_of(Vec<T> (&x)[N]) {
  constexpr int kParts = sizeof(double) / sizeof(T);
  for (int i = 0; i < N; ++i) {
    T numbers[kLanes<T>];
    store(numbers, x[i]);
    for (int part = 0; part < kParts; ++part) {
      T* const at = numbers + part * kLanes<double>;
      Vec<double> y[] = {load_double(at)};
      const IntVec<double> none = y[0] < 0;
      log(y);
      store_double(at, none ? splat(std::numeric_limits<double>::quiet_NaN()) : y[0]);
    }
    x[i] = load(numbers);
  }
}

// Lambdas that return vectors capture, even nothing: GCC gives a function to which one without
// captures converts the default instruction set.

// Reals of one step.
template <class T>
bool run_real(const program::Instruction& x, const StepSize& size, const StepData& to,
              const StepData& a, const StepData& b, const StepData& c) {
  using program::Op;
  using V = Vec<T>;
  const auto each = [&](auto f) QKV_INLINE_LAMBDA {
    each_vector<T, false>(size, to, a, b, c, f);
    return true;
  };
  const auto in_step = [&](auto f)
                           QKV_INLINE_LAMBDA { return each_in_step<T>(size, to, a, f), true; };
  const auto lanes = [&](auto f)
                         QKV_INLINE_LAMBDA { return each_lane<T, false>(size, to, a, b, f), true; };
  switch (x.op) {
    case Op::add:
      return each([&](V p, V q, V) QKV_INLINE_LAMBDA { return p + q; });
    case Op::sub:
      return each([&](V p, V q, V) QKV_INLINE_LAMBDA { return p - q; });
    case Op::mul:
      return each([&](V p, V q, V) QKV_INLINE_LAMBDA { return p * q; });
    case Op::div:
      return each([&](V p, V q, V) QKV_INLINE_LAMBDA { return p / q; });
    case Op::neg:
      return each([&](V p, V, V) QKV_INLINE_LAMBDA { return -p; });
    case Op::abs:
      return each([&](V p, V, V)
                      QKV_INLINE_LAMBDA { return (V)((IntVec<T>)p & ~(IntVec<T>)splat(T(-0.))); });
    // NaN of either comes through.
    case Op::min:
      return each([&](V p, V q, V) QKV_INLINE_LAMBDA { return p != p ? p : p < q ? p : q; });
    case Op::max:
      return each([&](V p, V q, V) QKV_INLINE_LAMBDA { return p != p ? p : p > q ? p : q; });
    case Op::exp:
      return in_step([&](auto& p) QKV_INLINE_LAMBDA { exp_of<T>(p); });
    case Op::log:
      return in_step([&](auto& p) QKV_INLINE_LAMBDA { log_of<T>(p); });
    case Op::tanh:
      return in_step([&](auto& p) QKV_INLINE_LAMBDA { tanh<T>(p); });
    case Op::sigmoid:
      return in_step([&](auto& p) QKV_INLINE_LAMBDA {
        for (V& y : p) y = -y;
        exp_of<T>(p);
        for (V& y : p) y = 1 / (1 + y);
      });
    case Op::sqrt:
      return lanes([&](double p, double) QKV_INLINE_LAMBDA { return std::sqrt(p); });
    case Op::rsqrt:
      return lanes([&](double p, double) QKV_INLINE_LAMBDA { return 1 / std::sqrt(p); });
    case Op::floor:
      return lanes([&](double p, double) QKV_INLINE_LAMBDA { return std::floor(p); });
    case Op::sin:
      return lanes([&](double p, double) QKV_INLINE_LAMBDA { return std::sin(p); });
    case Op::cos:
      return lanes([&](double p, double) QKV_INLINE_LAMBDA { return std::cos(p); });
    case Op::floordiv:
      return lanes([&](double p, double q) QKV_INLINE_LAMBDA { return std::floor(p / q); });
    case Op::rem:
      return lanes([&](double p, double q) QKV_INLINE_LAMBDA { return p - std::floor(p / q) * q; });
    default:
      return false;
  }
}

// Integers and booleans of one step, a boolean being all ones or all zeros. Quotients of integers
// of 32 bits are exact in double once they are rounded down.
template <class T>
bool run_integer(const program::Instruction& x, const StepSize& size, const StepData& to,
                 const StepData& a, const StepData& b, const StepData& c) {
  using program::Op;
  using V = IntVec<T>;
  const auto each = [&](auto f) QKV_INLINE_LAMBDA {
    each_vector<T, true>(size, to, a, b, c, f);
    return true;
  };
  const auto lanes = [&](auto f)
                         QKV_INLINE_LAMBDA { return each_lane<T, true>(size, to, a, b, f), true; };
  switch (x.op) {
    case Op::add:
      return each([&](V p, V q, V) QKV_INLINE_LAMBDA { return wrap<T>(p + q); });
    case Op::sub:
      return each([&](V p, V q, V) QKV_INLINE_LAMBDA { return wrap<T>(p - q); });
    case Op::mul:
      return each([&](V p, V q, V) QKV_INLINE_LAMBDA { return wrap<T>(p * q); });
    case Op::neg:
      return each([&](V p, V, V) QKV_INLINE_LAMBDA { return wrap<T>(-p); });
    case Op::abs:
      return each([&](V p, V, V) QKV_INLINE_LAMBDA { return wrap<T>(p < 0 ? -p : p); });
    case Op::min:
      return each([&](V p, V q, V) QKV_INLINE_LAMBDA { return p < q ? p : q; });
    case Op::max:
      return each([&](V p, V q, V) QKV_INLINE_LAMBDA { return p > q ? p : q; });
    case Op::floordiv:
      return lanes([&](double p, double q)
                       QKV_INLINE_LAMBDA { return q == 0 ? 0 : std::floor(p / q); });
    case Op::rem:
      return lanes([&](double p, double q)
                       QKV_INLINE_LAMBDA { return q == 0 ? 0 : p - std::floor(p / q) * q; });
    case Op::logical_and:
      return each([&](V p, V q, V) QKV_INLINE_LAMBDA { return p & q; });
    case Op::logical_or:
      return each([&](V p, V q, V) QKV_INLINE_LAMBDA { return p | q; });
    case Op::logical_xor:
      return each([&](V p, V q, V) QKV_INLINE_LAMBDA { return p ^ q; });
    case Op::logical_not:
      return each([&](V p, V, V) QKV_INLINE_LAMBDA { return ~p; });
    case Op::shl:
      return each([&](V p, V q, V) QKV_INLINE_LAMBDA { return wrap<T>(p << (q & 31)); });
    case Op::shr:
      return each([&](V p, V q, V) QKV_INLINE_LAMBDA { return p >> (q & 31); });
    case Op::place:
      return each([size_of = IntLane<T>(x.integer), stride = IntLane<T>(x.stride)](V p, V, V)
                      QKV_INLINE_LAMBDA {
                        const V index = p < 0 ? p + size_of : p;
                        const V inside = (index >= 0) & (index < size_of);
                        return inside ? index * stride : V{} + program::kOutside;
                      });
    case Op::join_places:
      return each([&](V p, V q, V)
                      QKV_INLINE_LAMBDA { return (p | q) < 0 ? V{} + program::kOutside : p + q; });
    default:
      return false;
  }
}

// Comparisons of two of the type of a, choices, and conversions.
template <class T>
void run_other(const program::Instruction& x, program::Type from, const StepSize& size,
               const StepData& to, const StepData& a, const StepData& b, const StepData& c) {
  using program::Op;
  const auto compare = [&](auto f) QKV_INLINE_LAMBDA {
    const auto bits = [&](auto p, auto q, auto) QKV_INLINE_LAMBDA { return (IntVec<T>)f(p, q); };
    from == program::Type::real ? each_vector<T, false>(size, to, a, b, c, bits)
                                : each_vector<T, true>(size, to, a, b, c, bits);
  };
  using V = IntVec<T>;
  switch (x.op) {
    case Op::eq:
      return compare([&](auto p, auto q) QKV_INLINE_LAMBDA { return p == q; });
    case Op::ne:
      return compare([&](auto p, auto q) QKV_INLINE_LAMBDA { return p != q; });
    case Op::lt:
      return compare([&](auto p, auto q) QKV_INLINE_LAMBDA { return p < q; });
    case Op::le:
      return compare([&](auto p, auto q) QKV_INLINE_LAMBDA { return p <= q; });
    case Op::gt:
      return compare([&](auto p, auto q) QKV_INLINE_LAMBDA { return p > q; });
    case Op::ge:
      return compare([&](auto p, auto q) QKV_INLINE_LAMBDA { return p >= q; });
    case Op::where:
      return each_vector<T, true>(
          size, to, a, b, c, [&](V which, V p, V q) QKV_INLINE_LAMBDA { return which ? p : q; });
    case Op::to_real:
      return each_vector<T, true>(size, to, a, b, c, [from](V p, V, V) QKV_INLINE_LAMBDA {
        return __builtin_convertvector(from == program::Type::boolean ? -p : p, Vec<T>);
      });
    default:  // to_integer
      if (from == program::Type::boolean)
        return each_vector<T, true>(size, to, a, b, c,
                                    [&](V p, V, V) QKV_INLINE_LAMBDA { return -p; });
      return each_vector<T, false>(size, to, a, b, c,
                                   [&](Vec<T> p, Vec<T>, Vec<T>)
                                       QKV_INLINE_LAMBDA { return __builtin_convertvector(p, V); });
  }
}

}  // namespace qkv::QKV_ISA
