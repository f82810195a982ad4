#include "program/differentiate.h"

namespace qkv::program {
namespace {

// What a change of an operand is multiplied by.
enum class Factor { one, minus_one, number, if_true, if_false };
struct Partial {
  int operand = -1;
  Factor factor = Factor::one;
  int number = -1;  // the instruction that is the factor, or whose truth decides
};
struct Partials {
  Partial first, second;
};

// The derivatives of an instruction by its operands. Those of what is not here are 0: of integers,
// of comparisons, and of what rounds.
Partials partials(Builder& p, int n) {
  const Instruction x = p[n];
  if (x.type != Type::real) return {};
  const auto times = [](int operand, int number) {
    return Partial{operand, Factor::number, number};
  };
  const auto one = [&] { return p.real(1); };
  switch (x.op) {
    case Op::add:
      return {{x.a}, {x.b}};
    case Op::sub:
      return {{x.a}, {x.b, Factor::minus_one}};
    case Op::mul:
      return {times(x.a, x.b), times(x.b, x.a)};
    case Op::div: {
      const int inverse = p.make(Op::div, one(), x.b);
      return {times(x.a, inverse), times(x.b, p.make(Op::neg, p.make(Op::mul, n, inverse)))};
    }
    case Op::rem:  // a - floor(a / b) * b
      return {{x.a}, times(x.b, p.make(Op::neg, p.make(Op::floordiv, x.a, x.b)))};
    case Op::min:
    case Op::max: {
      // Two that are equal share the gradient, as torch has it.
      const int half = p.make(Op::where, p.compare(Op::eq, x.a, x.b), p.real(.5), p.real(0));
      const auto share = [&](int own, int other) {
        const int wins = p.compare(x.op == Op::min ? Op::lt : Op::gt, own, other);
        return times(own, p.make(Op::where, wins, one(), half));
      };
      return {share(x.a, x.b), share(x.b, x.a)};
    }
    case Op::neg:
      return {{x.a, Factor::minus_one}, {}};
    case Op::abs: {
      const int zero = p.real(0);
      const int above = p.make(Op::where, p.compare(Op::gt, x.a, zero), one(), zero);
      return {times(x.a, p.make(Op::where, p.compare(Op::lt, x.a, zero), p.real(-1), above)), {}};
    }
    case Op::exp:
      return {times(x.a, n), {}};
    case Op::log:
      return {times(x.a, p.make(Op::div, one(), x.a)), {}};
    case Op::tanh:
      return {times(x.a, p.make(Op::sub, one(), p.make(Op::mul, n, n))), {}};
    case Op::sigmoid:
      return {times(x.a, p.make(Op::mul, n, p.make(Op::sub, one(), n))), {}};
    case Op::sqrt:
      return {times(x.a, p.make(Op::div, p.real(.5), n)), {}};
    case Op::rsqrt:
      return {times(x.a, p.make(Op::mul, p.real(-.5), p.make(Op::div, n, x.a))), {}};
    case Op::sin:
      return {times(x.a, p.make(Op::cos, x.a)), {}};
    case Op::cos:
      return {times(x.a, p.make(Op::neg, p.make(Op::sin, x.a))), {}};
    case Op::where:
      return {{x.b, Factor::if_true, x.a}, {x.c, Factor::if_false, x.a}};
    default:
      return {};
  }
}

int product(Builder& p, int change, const Partial& by) {
  switch (by.factor) {
    case Factor::one:
      return change;
    case Factor::minus_one:
      return p.make(Op::neg, change);
    case Factor::number:
      return p.make(Op::mul, change, by.number);
    // Selected and not multiplied: 0 times what is not finite would be NaN.
    case Factor::if_true:
      return p.make(Op::where, by.number, change, p.real(0));
    case Factor::if_false:
      return p.make(Op::where, by.number, p.real(0), change);
  }
  return change;
}

// sum += x, where -1 is 0.
void accumulate(Builder& p, int& sum, int x) { sum = sum < 0 ? x : p.make(Op::add, sum, x); }

}  // namespace

Gradients gradients(Builder& p, int result, int grad) {
  std::vector<int> sums(size_t(p.size()), -1);
  sums[size_t(result)] = grad;
  Gradients found;
  for (int n = result; n >= 0; --n) {
    const int sum = sums[size_t(n)];
    if (sum < 0) continue;
    const Instruction x = p[n];
    if (x.op == Op::score) found.score = sum;
    if (x.op == Op::load && x.type == Type::real) found.tables.push_back({n, sum});
    const Partials of = partials(p, n);
    for (const Partial& by : {of.first, of.second})
      if (by.operand >= 0) accumulate(p, sums[size_t(by.operand)], product(p, sum, by));
  }
  return found;
}

std::vector<int> changes(Builder& p) {
  std::vector<int> all(size_t(p.size()), -1);
  for (int n = 0; n < int(all.size()); ++n) {
    const Instruction x = p[n];
    int& change = all[size_t(n)];
    if (x.op == Op::score) change = p.input(Op::change);
    if (x.op == Op::grad) change = p.input(Op::grad_change);
    if (x.op == Op::load && x.type == Type::real) {
      Instruction along = x;
      along.op = Op::load_direction;
      change = p.add(along);
    }
    const Partials of = partials(p, n);
    for (const Partial& by : {of.first, of.second})
      if (by.operand >= 0 && all[size_t(by.operand)] >= 0)
        accumulate(p, change, product(p, all[size_t(by.operand)], by));
  }
  return all;
}

}  // namespace qkv::program
