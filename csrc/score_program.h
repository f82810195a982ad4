// A function of one's own that scores go through: score_ij = f(softcap(scale * dot), b, h, i, j),
// as a program that kernels interpret a tile at a time. A part of the public interface
// (attention.h); docs/kernels.md has the text of programs and what each instruction does.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "export.h"

namespace qkv {

namespace program {
class Builder;
struct Compiled;
}  // namespace program

// A program, ready to be run and differentiated. It may be shared by any number of threads.
class QKV_CORE_API ScoreProgram {
 public:
  // Throws std::invalid_argument with the line that is wrong, and why.
  explicit ScoreProgram(std::string_view text);
  ~ScoreProgram();

  // How many elements the tables of reals and of integers have at least that it reads.
  int64_t table_size() const;
  int64_t index_size() const;
  // Whether gradients of tables are added up in double, and not in the compute type: those of
  // tables that are so small that many pairs may add to an element.
  bool sums_in_double() const { return table_size() <= 65536; }

  // Whether a score may become -inf, which hides the pair: whether -inf is among its numbers.
  bool hides() const;

  // All instructions, and the one whose result the score becomes.
  const program::Builder& instructions() const;
  int result() const;

  // For kernels. Of a tile: the scores; their changes; the gradients of the scores before, and of
  // tables; and those two, of which the second are the changes, with the changes of tables'
  // gradients.
  const program::Compiled& forward() const;
  const program::Compiled& jvp() const;
  const program::Compiled& backward() const;
  const program::Compiled& double_backward() const;

 private:
  struct Parts;
  std::unique_ptr<const Parts> parts_;
};

// The program of a Problem, and what it reads. T is the compute type.
struct ScoreFunction {
  const ScoreProgram* program = nullptr;
  const void* tables = nullptr;      // T [R, table_size()], rows table_step elements apart
  const int32_t* indices = nullptr;  // [R, index_size()], likewise
  int64_t table_step = 0, index_step = 0;
  // Batch item b reads row b / items, and is item b % items to the program, counted from
  // Problem::dropout_batch. 0: one row serves all batch items.
  int64_t items = 0;
  int64_t rows = 1;  // R
  // Query i is i to the program; with this, i + S - L: the last query stands at the last key.
  bool from_last = false;
};

}  // namespace qkv
