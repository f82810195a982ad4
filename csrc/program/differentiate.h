// Derivatives of programs, as further instructions of the same list.
#pragma once

#include <vector>

#include "program/builder.h"

namespace qkv::program {

// A real that is added to the gradient of tables, at the place, and from the table's first element
// on, of a load.
struct TableGradient {
  int load, value;  // instructions
};

struct Gradients {
  int score = -1;  // of the score; -1: it is 0
  std::vector<TableGradient> tables;
};

// The gradients of what instruction `result` depends on, if its own is instruction `grad`.
Gradients gradients(Builder& program, int result, int grad);

// How instruction n changes, for each of those that are there; -1: not at all. The score changes by
// Op::change, Op::grad by Op::grad_change, and tables along their direction.
std::vector<int> changes(Builder& program);

}  // namespace qkv::program
