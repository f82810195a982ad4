// Instructions in the order in which kernels run them (kernels/score/interpreter.h), without those
// that nothing needs, and with memory for their results.
//
// A tile of scores has a key in each row and a query in each lane. A result that depends on the
// query or the head alone is the same in every row, one that depends on the key alone is the same
// in every lane, and others may depend on neither: only what depends on both is worked out for each
// score.
#pragma once

#include <optional>
#include <vector>

#include "program/builder.h"
#include "program/differentiate.h"

namespace qkv::program {

// Which function of kernels runs a step (kernels/score/program_operations.h).
enum class Kind : uint8_t { begins, loads, converts, bits, compares, reals };

struct Step {
  Instruction instruction;  // its operands are numbers of steps
  Kind kind;
  Type from;  // of the first operand
  // What the result depends on. The head differs by lane only where heads share their keys.
  bool by_row, by_lane, by_head;
  // Of an integer: by how much it grows from key to key, as long as it does not wrap and no place
  // in it begins to count from the other end.
  std::optional<int64_t> per_key;
  // Of a place that has per_key and depends on the query: its number among such. A tile in which it
  // grows evenly reads its elements where they are in the table.
  int line = -1;
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
  // Those of `each` that lines are made of, and those that are left to do where all lines grow
  // evenly.
  std::vector<int> of_lines, beside_lines;
  int lines = 0;
  std::vector<int> results;  // steps
  // The last step of `each`, if it gives the only result and may write it over what it reads, once
  // the sums are added; -1: results are copied.
  int in_place = -1;
  std::vector<TableSum> sums;
};

// The steps for `results` and `tables`, which are instructions of `program`.
Compiled compile(const Builder& program, const std::vector<int>& results,
                 const std::vector<TableGradient>& tables = {});

}  // namespace qkv::program
