// The instructions of a score program: what a user's function does to one score, as a list of
// operations on numbers. An instruction's operands are the results of earlier ones, which are known
// by their places in the list.
//
// Docs: docs/kernels.md has the text of programs, and how an instruction is added.
#pragma once

#include <cstdint>

namespace qkv::program {

// Of a result. Reals are of the compute type, and integers have 32 bits and wrap.
enum class Type : uint8_t { real, integer, boolean };

enum class Op : uint8_t {
  // What a program is given of a pair. The last three are those of derivatives: how the score
  // changes, the gradient of the result, and how that changes.
  score,
  batch,
  head,
  query,
  key,
  change,
  grad,
  grad_change,
  constant,  // `real`, or `integer` for integers and booleans
  // Arithmetic of reals and of integers.
  add,
  sub,
  mul,
  min,
  max,
  floordiv,  // rounded down, as Python's //; integers divided by 0 are 0
  rem,       // of the sign of the divisor, as Python's %; of integers divided by 0, 0
  neg,
  abs,
  // Of reals.
  div,
  exp,
  log,
  tanh,
  sigmoid,
  sqrt,
  rsqrt,
  floor,
  sin,
  cos,
  // Comparisons, of two of one type.
  eq,
  ne,
  lt,
  le,
  gt,
  ge,
  // Of booleans, and bit by bit of integers.
  logical_and,
  logical_or,
  logical_xor,
  logical_not,
  shl,
  shr,
  where,       // a ? b : c
  to_real,     // of an integer or a boolean
  to_integer,  // of a real, towards 0, or of a boolean
  // An index `a` of a dimension of size `integer` whose elements are `stride` apart, as a place in
  // a table: index * stride, counted from the end if it is negative; kOutside if it is outside.
  place,
  join_places,  // a + b; kOutside if one of them is
  // The element at place `a` of the table that begins with element `integer`. At kOutside a real is
  // NaN, and an integer 0.
  load,
  load_direction,  // the same of the direction of tables, for derivatives
};

// Any negative place stands for none.
constexpr int32_t kOutside = -(1 << 30);

struct Instruction {
  Op op;
  Type type;
  int a = -1, b = -1, c = -1;  // the operands; -1: none
  double real = 0;
  int64_t integer = 0, stride = 0;
};

}  // namespace qkv::program
