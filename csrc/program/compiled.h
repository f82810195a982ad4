// Instructions in the order in which kernels run them (kernels/score/interpreter.h), without those
// that nothing needs, and with memory for their results.
//
// A tile of scores has a key in each row and a query in each lane. A result that depends on the
// query or the head alone is the same in every row, one that depends on the key alone is the same
// in every lane, and others may depend on neither: only what depends on both is worked out for each
// score.
#pragma once

#include <vector>

#include "program/builder.h"
#include "program/differentiate.h"

namespace qkv::program {

struct Step {
  Instruction instruction;  // its operands are numbers of steps
  bool by_row, by_lane;     // what the result depends on
  // Which piece of memory has the result: of those of steps that no row changes, which are run
  // once a tile, or of the others, which are run for a few rows at a time.
  int memory = 0;
};

// What is written of a tile: a result to the scores, or their gradients, or a sum to the gradient
// of tables.
struct TableSum {
  int place, value;  // steps
  int64_t offset;    // of the table
};

struct Compiled {
  std::vector<Step> steps;
  std::vector<int> once, each;           // steps, in their order
  int once_memory = 0, each_memory = 0;  // how many pieces of either
  std::vector<int> results;              // steps
  std::vector<TableSum> sums;
};

// The steps for `results` and `tables`, which are instructions of `program`.
Compiled compile(const Builder& program, const std::vector<int>& results,
                 const std::vector<TableGradient>& tables = {});

}  // namespace qkv::program
