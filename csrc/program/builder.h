// Makes lists of instructions: what is the same twice is there once, products with 1 and -1 and
// choices by what is not are without these, and quotients by powers of two are shifts.
#pragma once

#include <cstddef>
#include <map>
#include <tuple>
#include <vector>

#include "program/instruction.h"

namespace qkv::program {

class Builder {
 public:
  int size() const { return int(list_.size()); }
  const Instruction& operator[](int n) const { return list_[std::size_t(n)]; }

  // Each returns the number of the instruction.
  int add(const Instruction& x);
  int real(double x) { return add({.op = Op::constant, .type = Type::real, .real = x}); }
  int integer(int64_t x) { return add({.op = Op::constant, .type = Type::integer, .integer = x}); }
  int input(Op op, Type type = Type::real) { return add({.op = op, .type = type}); }
  // Operations whose results have the type of their last operand.
  int make(Op op, int a, int b = -1, int c = -1);
  int compare(Op op, int a, int b) {
    return add({.op = op, .type = Type::boolean, .a = a, .b = b});
  }
  // The element of a table [sizes...] that begins with element `offset`, at integer indices.
  int load(Type type, int64_t offset, const std::vector<int64_t>& sizes,
           const std::vector<int>& indices);

 private:
  std::vector<Instruction> list_;
  std::map<std::tuple<Op, Type, int, int, int, int64_t, int64_t, int64_t>, int> numbers_;
};

}  // namespace qkv::program
