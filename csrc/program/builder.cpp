#include "program/builder.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace qkv::program {
namespace {

// The power of two that an integer constant is; -1: none.
int power_of_two(const Instruction& x) {
  if (x.op != Op::constant || x.type != Type::integer) return -1;
  for (int n = 0; n < 31; ++n)
    if (x.integer == int64_t(1) << n) return n;
  return -1;
}

bool is_real(const Instruction& x, double value) {
  return x.op == Op::constant && x.type == Type::real && x.real == value;
}

}  // namespace

int Builder::add(const Instruction& x) {
  int64_t bits;  // by which NaN is the same as itself, and 0 is not -0
  std::memcpy(&bits, &x.real, sizeof bits);
  const auto [known, is_new] =
      numbers_.try_emplace({x.op, x.type, x.a, x.b, x.c, bits, x.integer, x.stride}, size());
  if (is_new) list_.push_back(x);
  return known->second;
}

int Builder::make(Op op, int a, int b, int c) {
  if (op == Op::mul && is_real((*this)[a], 1)) return b;
  if (op == Op::mul && is_real((*this)[b], 1)) return a;
  if (op == Op::mul && is_real((*this)[b], -1)) return make(Op::neg, a);
  if (op == Op::neg && (*this)[a].op == Op::neg) return (*this)[a].a;
  if (op == Op::where && (*this)[a].op == Op::logical_not)
    return make(Op::where, (*this)[a].a, c, b);
  // There are no vector instructions for quotients of integers.
  const int power = b < 0 ? -1 : power_of_two((*this)[b]);
  if (op == Op::floordiv && power >= 0) return make(Op::shr, a, integer(power));
  if (op == Op::rem && power >= 0) return make(Op::logical_and, a, integer((*this)[b].integer - 1));
  return add({.op = op, .type = (*this)[c >= 0 ? c : b >= 0 ? b : a].type, .a = a, .b = b, .c = c});
}

int Builder::load(Type type, int64_t offset, const std::vector<int64_t>& sizes,
                  const std::vector<int>& indices) {
  int place = -1;
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0; stride *= sizes[d]) {
    const Instruction& index = (*this)[indices[d]];
    if (index.op == Op::constant && (index.integer < -sizes[d] || index.integer >= sizes[d]))
      throw std::invalid_argument("index " + std::to_string(index.integer) +
                                  " is outside of dimension " + std::to_string(d) + " of size " +
                                  std::to_string(sizes[d]));
    const int at = add({.op = Op::place,
                        .type = Type::integer,
                        .a = indices[d],
                        .integer = sizes[d],
                        .stride = stride});
    place = place < 0 ? at : make(Op::join_places, at, place);
  }
  if (place < 0) place = integer(0);
  return add({.op = Op::load, .type = type, .a = place, .integer = offset});
}

}  // namespace qkv::program
