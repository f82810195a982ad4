#include "program/differentiate.h"

namespace qkv::program {
namespace {

// A change of an operand, times a real; or where a boolean is true.
struct Partial {
  int operand, factor;  // instructions
};

// The derivatives of an instruction by its operands. Those of what is not here are 0: of integers,
// of comparisons, and of what rounds.
std::vector<Partial> partials(Builder& p, int n) {
  const Instruction x = p[n];
  if (x.type != Type::real) return {};
  const auto one = [&] { return p.real(1); };
  switch (x.op) {
    case Op::add:
      return {{x.a, one()}, {x.b, one()}};
    case Op::sub:
      return {{x.a, one()}, {x.b, p.real(-1)}};
    case Op::mul:
      return {{x.a, x.b}, {x.b, x.a}};
    case Op::div: {
      const int inverse = p.make(Op::div, one(), x.b);
      return {{x.a, inverse}, {x.b, p.make(Op::neg, p.make(Op::mul, n, inverse))}};
    }
    case Op::rem:  // a - floor(a / b) * b
      return {{x.a, one()}, {x.b, p.make(Op::neg, p.make(Op::floordiv, x.a, x.b))}};
    case Op::min:
    case Op::max: {
      // Two that are equal share the gradient, as torch has it.
      const int half = p.make(Op::where, p.compare(Op::eq, x.a, x.b), p.real(.5), p.real(0));
      const auto share = [&](int own, int other) {
        const int wins = p.compare(x.op == Op::min ? Op::lt : Op::gt, own, other);
        return Partial{own, p.make(Op::where, wins, one(), half)};
      };
      return {share(x.a, x.b), share(x.b, x.a)};
    }
    case Op::neg:
      return {{x.a, p.real(-1)}};
    case Op::abs: {
      const int zero = p.real(0);
      const int above = p.make(Op::where, p.compare(Op::gt, x.a, zero), one(), zero);
      return {{x.a, p.make(Op::where, p.compare(Op::lt, x.a, zero), p.real(-1), above)}};
    }
    case Op::exp:
      return {{x.a, n}};
    case Op::log:
      return {{x.a, p.make(Op::div, one(), x.a)}};
    case Op::tanh:
      return {{x.a, p.make(Op::sub, one(), p.make(Op::mul, n, n))}};
    case Op::sigmoid:
      return {{x.a, p.make(Op::mul, n, p.make(Op::sub, one(), n))}};
    case Op::sqrt:
      return {{x.a, p.make(Op::div, p.real(.5), n)}};
    case Op::rsqrt:
      return {{x.a, p.make(Op::mul, p.real(-.5), p.make(Op::div, n, x.a))}};
    case Op::sin:
      return {{x.a, p.make(Op::cos, x.a)}};
    case Op::cos:
      return {{x.a, p.make(Op::neg, p.make(Op::sin, x.a))}};
    case Op::where:
      return {{x.b, x.a}, {x.c, p.make(Op::logical_not, x.a)}};
    default:
      return {};
  }
}

// Selected and not multiplied by truth: 0 times what is not finite would be NaN.
int product(Builder& p, int change, int factor) {
  return p[factor].type == Type::boolean ? p.make(Op::where, factor, change, p.real(0))
                                         : p.make(Op::mul, change, factor);
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
    for (const auto& [operand, factor] : partials(p, n))
      accumulate(p, sums[size_t(operand)], product(p, sum, factor));
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
    for (const auto& [operand, factor] : partials(p, n))
      if (all[size_t(operand)] >= 0)
        accumulate(p, change, product(p, all[size_t(operand)], factor));
  }
  return all;
}

}  // namespace qkv::program
