// Runs a score program over a tile (program/compiled.h): first what is the same in every row, then
// the rest, for a few rows at a time, whose results stay in the first-level cache.
#pragma once

#include "kernels/score/program_inputs.h"
#include "kernels/score/program_operations.h"
#include "kernels/score/program_tables.h"

namespace qkv::QKV_ISA {

template <class T>
class Interpreter {
  static constexpr int64_t kVector = kVectorBytes;
  // Results of some rows of two vectors take at most so many bytes, a fourth of a first-level
  // cache, unless 8 rows take more. Where bits are fixed, sums of tables want those of all rows.
  static constexpr int64_t kMostBytes = 8192;

 public:
  // `memory` has memory_bytes(program) bytes.
  Interpreter(const Problem& p, const program::Compiled& program, const Tile& tile, int64_t key,
              const ProgramTile<T>& given, char* memory)
      : p_(p),
        program_(program),
        tile_(tile),
        inputs_(p, tile, key, given),
        rows_(most_rows(program)) {
    lines_ = reinterpret_cast<Line<T>*>(memory);
    data_ = reinterpret_cast<StepData*>(lines_ + program.lines);
    char* const once = memory + data_bytes(program);
    char* const each = once + program.once_memory * 2 * kVector;
    for (size_t n = 0; n < program.steps.size(); ++n) {
      const program::Step& step = program.steps[n];
      const int64_t lane = by_lane(step) ? kVector : 0;
      data_[n] = step.by_row ? StepData{each + step.memory * rows_ * 2 * kVector, 2 * kVector, lane}
                             : StepData{once + step.memory * 2 * kVector, 0, lane};
    }
    for (int n : program.once) run(n, 0, 1);
  }

  static size_t memory_bytes(const program::Compiled& program) {
    return size_t(data_bytes(program) +
                  (program.once_memory + program.each_memory * most_rows(program)) * 2 * kVector +
                  kVector);
  }

  // Runs the rest for `keys` keys. finish(row, rows) is called for every few rows, counted from the
  // tile's first: result() then has theirs. A result in place is written to `to` [keys x lanes]
  // only then.
  template <class Finish>
  void run_rows(int64_t keys, T* to, const Finish& finish) {
    has_lines_ = program_.lines > 0 && make_lines(keys);
    for (int64_t row = 0; row < keys; row += rows_) {
      const int64_t rows = std::min(rows_, keys - row);
      for (int n : has_lines_ ? program_.beside_lines : program_.each)
        if (n != program_.in_place) run(n, row, rows);
      finish(row, rows);
      if (program_.in_place < 0) continue;
      data_[program_.in_place] = rows_of_tile(tile_, to, row);
      run(program_.in_place, row, rows);
    }
  }
  const StepData& result(int step) const { return data_[step]; }
  int64_t vectors() const { return tile_.lanes / kLanes<T>; }
  bool by_lane(const program::Step& step) const {
    return step.by_lane || (step.by_head && p_.group() > 1);
  }
  // Null: its places are a result like others.
  const Line<T>* line(const program::Step& place) const {
    return has_lines_ && place.line >= 0 ? lines_ + place.line : nullptr;
  }
  // Whether all lanes of a line follow each other within the tables, of which one begins at
  // `offset`.
  bool follows(const Line<T>& line, int64_t offset) const {
    return line.follows && offset + line.most < p_.function->program->table_size();
  }

  // to [rows x lanes], of the tile, = the result of a step.
  void store_result(int step, int64_t rows, T* to) const {
    const StepData from = data_[step], into = rows_of_tile(tile_, to, 0);
    if (from.data == into.data) return;
    each_vector<T, false>(
        {rows, vectors(), true}, into, from, from, from,
        QKV_VECTORS(Vec<T> x, Vec<T>, Vec<T>) { return x; });
  }

 private:
  static int64_t most_rows(const program::Compiled& program) {
    if (kFixedBits && !program.sums.empty()) return kFixedKeys;
    const int64_t pieces = std::max<int64_t>(1, program.each_memory);
    return std::clamp<int64_t>(kMostBytes / (pieces * 2 * kVector), 8, 64);
  }
  static int64_t data_bytes(const program::Compiled& program) {
    const auto bytes =
        int64_t(size_t(program.lines) * sizeof(Line<T>) + program.steps.size() * sizeof(StepData));
    return (bytes + kVector - 1) / kVector * kVector;
  }
  const StepData& operand(int n) const { return n < 0 ? data_[0] : data_[n]; }

  // False: some do not grow evenly in this tile.
  bool make_lines(int64_t keys) {
    for (int64_t row : {int64_t(0), keys - 1})
      for (int n : program_.of_lines) {
        run(n, row, 1);
        const program::Step& step = program_.steps[size_t(n)];
        if (step.line < 0) continue;
        lines_[step.line].per_key = *step.per_key;
        if (!extend_line(lines_[step.line], data_[n], row, vectors())) return false;
      }
    for (int n = 0; n < program_.lines; ++n) finish_line(lines_[n], tile_, keys);
    return true;
  }

  // A step, for rows [row, row + rows) of the tile.
  void run(int n, int64_t row, int64_t rows) {
    using program::Kind;
    const program::Step& step = program_.steps[size_t(n)];
    const program::Instruction& x = step.instruction;
    const StepSize size{rows, by_lane(step) ? vectors() : 1, by_lane(step)};
    StepData& to = data_[n];
    const StepData &a = operand(x.a), &b = operand(x.b), &c = operand(x.c);
    switch (step.kind) {
      case Kind::begins:
        return inputs_.run(x, row, size, to);
      case Kind::loads:
        return load_elements(x, row, size, to, a);
      case Kind::converts:
        return convert<T>(x.type, step.from, size, to, a);
      case Kind::bits:
        return run_bits<T>(x, size, to, a, b, c);
      case Kind::compares:
        return run_comparison<T>(x, step.from, size, to, a, b);
      case Kind::reals:
        return run_real<T>(x, size, to, a, b, c);
    }
  }

  void load_elements(const program::Instruction& x, int64_t row, const StepSize& size, StepData& to,
                     const StepData& place) const {
    if (x.type == program::Type::integer)
      return load_integers_of<T>(inputs_.indices() + x.integer, size, to, place);
    const T* table = inputs_.table(x.op);
    if (table) table += x.integer;
    const Line<T>* const line = this->line(program_.steps[size_t(x.a)]);
    if (!table || !line)
      load_reals<T>(table, size, to, place);
    else if (follows(*line, x.integer))
      to = line->elements(table, row);
    else
      load_line(table, *line, row, size, to);
  }

  const Problem& p_;
  const program::Compiled& program_;
  const Tile& tile_;
  const ProgramInputs<T> inputs_;
  const int64_t rows_;        // that are run at a time
  StepData* data_ = nullptr;  // of each step
  Line<T>* lines_ = nullptr;
  bool has_lines_ = false;
};

}  // namespace qkv::QKV_ISA
