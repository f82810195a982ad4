// What each instruction of a score program does with vectors (program/instruction.h says what they
// mean).
#pragma once

#include "kernels/score/program_steps.h"
#include "kernels/simd/sine.h"
#include "kernels/simd/tanh.h"

namespace qkv::QKV_ISA {

// torch.remainder, which has the sign of q, and torch.floor_divide: as exact as fmod is, which p /
// q is not, and right for an infinite q.
inline bool has_other_sign(double rest, double q) { return rest != 0 && (rest < 0) != (q < 0); }

inline double remainder_of(double p, double q) {
  const double rest = std::fmod(p, q);
  return has_other_sign(rest, q) ? rest + q : rest;
}

inline double floor_of_quotient(double p, double q) {
  if (q == 0) return p / q;
  const double rest = std::fmod(p, q), whole = std::nearbyint((p - rest) / q);
  return has_other_sign(rest, q) ? whole - 1 : whole;
}

// Reals of one step.
template <class T>
void run_real(const program::Instruction& x, const StepSize& size, StepData to, StepData a,
              StepData b, StepData c) {
  using program::Op;
  using V = Vec<T>;
  const auto each = QKV_VECTORS(auto f) { each_vector<T, false>(size, to, a, b, c, f); };
  const auto in_step = QKV_VECTORS(auto f) { each_in_step<T>(size, to, a, f); };
  const auto wide = QKV_VECTORS(auto f) {
    each_in_step<T>(size, to, a, QKV_VECTORS(auto& p) { in_double<T>(p, f); });
  };
  const auto lanes = QKV_VECTORS(auto f) { each_lane<T, false>(size, to, a, b, f); };
  switch (x.op) {
    case Op::add:
      return each(QKV_VECTORS(V p, V q, V) { return p + q; });
    case Op::sub:
      return each(QKV_VECTORS(V p, V q, V) { return p - q; });
    case Op::mul:
      return each(QKV_VECTORS(V p, V q, V) { return p * q; });
    case Op::div:
      return each(QKV_VECTORS(V p, V q, V) { return p / q; });
    case Op::neg:
      return each(QKV_VECTORS(V p, V, V) { return -p; });
    case Op::abs:
      return each(QKV_VECTORS(V p, V, V) { return (V)((IntVec<T>)p & ~(IntVec<T>)splat(T(-0.))); });
    // NaN of either comes through.
    case Op::min:
      return each(QKV_VECTORS(V p, V q, V) { return p != p ? p : p < q ? p : q; });
    case Op::max:
      return each(QKV_VECTORS(V p, V q, V) { return p != p ? p : p > q ? p : q; });
    case Op::exp:
      return in_step(QKV_VECTORS(auto& p) { exp_of<T>(p); });
    case Op::log:
      return wide(QKV_VECTORS(Vec<double> p) { return log_of(p); });
    case Op::sin:
      return wide(QKV_VECTORS(Vec<double> p) { return sine(p, 0); });
    case Op::cos:
      return wide(QKV_VECTORS(Vec<double> p) { return sine(p, 1); });
    case Op::tanh:
      return in_step(QKV_VECTORS(auto& p) { tanh<T>(p); });
    case Op::sigmoid:
      return in_step(QKV_VECTORS(auto& p) {
        for (V& y : p) y = -y;
        exp_of<T>(p);
        for (V& y : p) y = 1 / (1 + y);
      });
    case Op::sqrt:
      return lanes(QKV_VECTORS(double p, double) { return std::sqrt(p); });
    case Op::rsqrt:
      return lanes(QKV_VECTORS(double p, double) { return 1 / std::sqrt(p); });
    case Op::floor:
      return lanes(QKV_VECTORS(double p, double) { return std::floor(p); });
    case Op::floordiv:
      return lanes(QKV_VECTORS(double p, double q) { return floor_of_quotient(p, q); });
    case Op::rem:
      return lanes(QKV_VECTORS(double p, double q) { return remainder_of(p, q); });
    default:
      return;
  }
}

// Integers of one step, which wrap; booleans, which are all ones or all zeros; and what goes bit by
// bit, whatever it is.
template <class T>
void run_bits(const program::Instruction& x, const StepSize& size, StepData to, StepData a,
              StepData b, StepData c) {
  using program::Op;
  using V = IntVec<T>;
  const auto each = QKV_VECTORS(auto f) { each_vector<T, true>(size, to, a, b, c, f); };
  const auto lanes = QKV_VECTORS(auto f) { each_lane<T, true>(size, to, a, b, f); };
  const auto elements = IntLane<T>(x.integer), stride = IntLane<T>(x.stride);
  const V outside = V{} + program::kOutside;
  switch (x.op) {
    case Op::add:
      return each(QKV_VECTORS(V p, V q, V) { return wrap<T>(p + q); });
    case Op::sub:
      return each(QKV_VECTORS(V p, V q, V) { return wrap<T>(p - q); });
    case Op::mul:
      return each(QKV_VECTORS(V p, V q, V) { return wrap<T>(p * q); });
    case Op::neg:
      return each(QKV_VECTORS(V p, V, V) { return wrap<T>(-p); });
    case Op::abs:
      return each(QKV_VECTORS(V p, V, V) { return wrap<T>(p < 0 ? -p : p); });
    case Op::min:
      return each(QKV_VECTORS(V p, V q, V) { return p < q ? p : q; });
    case Op::max:
      return each(QKV_VECTORS(V p, V q, V) { return p > q ? p : q; });
    // Quotients of integers of 32 bits are exact in double once they are rounded down.
    case Op::floordiv:
      return lanes(QKV_VECTORS(double p, double q) { return q == 0 ? 0 : std::floor(p / q); });
    case Op::rem:
      return lanes(
          QKV_VECTORS(double p, double q) { return q == 0 ? 0 : p - std::floor(p / q) * q; });
    case Op::logical_and:
      return each(QKV_VECTORS(V p, V q, V) { return p & q; });
    case Op::logical_or:
      return each(QKV_VECTORS(V p, V q, V) { return p | q; });
    case Op::logical_xor:
      return each(QKV_VECTORS(V p, V q, V) { return p ^ q; });
    case Op::logical_not:
      return each(QKV_VECTORS(V p, V, V) { return ~p; });
    // A count below 0 or above 31 shifts every bit out, as in torch.
    case Op::shl:
      return each(QKV_VECTORS(V p, V q, V) { return (q & ~31) == 0 ? wrap<T>(p << (q & 31)) : 0; });
    case Op::shr:
      return each(QKV_VECTORS(V p, V q, V) { return p >> ((q & ~31) == 0 ? q : V{} + 31); });
    case Op::place:
      return each(QKV_VECTORS(V p, V, V) {
        const V index = p < 0 ? p + elements : p;
        const auto is_inside = (index >= 0) & (index < elements);
        return is_inside ? index * stride : outside;
      });
    case Op::join_places:
      return each(QKV_VECTORS(V p, V q, V) { return (p | q) < 0 ? outside : p + q; });
    case Op::where:
      return each(QKV_VECTORS(V which, V p, V q) { return which ? p : q; });
    default:
      return;
  }
}

// Comparisons of two of type `from`.
template <class T>
void run_comparison(const program::Instruction& x, program::Type from, const StepSize& size,
                    StepData to, StepData a, StepData b) {
  using program::Op;
  const auto compare = QKV_VECTORS(auto f) {
    const auto bits = QKV_VECTORS(auto p, auto q, auto) { return (IntVec<T>)f(p, q); };
    from == program::Type::real ? each_vector<T, false>(size, to, a, b, b, bits)
                                : each_vector<T, true>(size, to, a, b, b, bits);
  };
  switch (x.op) {
    case Op::eq:
      return compare(QKV_VECTORS(auto p, auto q) { return p == q; });
    case Op::ne:
      return compare(QKV_VECTORS(auto p, auto q) { return p != q; });
    case Op::lt:
      return compare(QKV_VECTORS(auto p, auto q) { return p < q; });
    case Op::le:
      return compare(QKV_VECTORS(auto p, auto q) { return p <= q; });
    case Op::gt:
      return compare(QKV_VECTORS(auto p, auto q) { return p > q; });
    case Op::ge:
      return compare(QKV_VECTORS(auto p, auto q) { return p >= q; });
    default:
      return;
  }
}

}  // namespace qkv::QKV_ISA
