// Runs a score program over a tile (program/compiled.h): first what is the same in every row, then
// the rest, for a few rows at a time, whose results stay in the first-level cache.
#pragma once

#include "kernels/operands/operands.h"
#include "kernels/score/program_operations.h"
#include "kernels/score/program_tables.h"

namespace qkv::QKV_ISA {

// What a program is given of a tile [keys x lanes], by the instructions of these names. Null: it
// has no such instruction.
template <class T>
struct ProgramTile {
  const T *score = nullptr, *change = nullptr, *grad = nullptr, *grad_change = nullptr;
  const T* direction = nullptr;  // of tables; null: 0
};

template <class T>
class Interpreter {
  // 8 rows of 2 vectors: ten results are 10 KiB with vectors of 64 bytes.
  static constexpr int64_t kRows = 8;
  static constexpr int64_t kVector = kVectorBytes;

 public:
  // `memory` has memory_bytes(program) bytes.
  Interpreter(const Problem& p, const program::Compiled& program, const Tile& tile, int64_t key,
              const ProgramTile<T>& given, char* memory)
      : p_(p), program_(program), tile_(tile), key_(key), given_(given) {
    const ScoreFunction& f = *p.function;
    const int64_t row = f.items ? tile.plane.batch / f.items : 0;
    item_ = tile.plane.batch - row * f.items + p.dropout_batch;
    if (f.tables) tables_ = static_cast<const T*>(f.tables) + row * f.table_step;
    if (f.indices) indices_ = f.indices + row * f.index_step;
    if (given.direction) given_.direction += row * f.table_step;
    data_ = reinterpret_cast<StepData*>(memory);
    char* const once = memory + data_bytes(program);
    char* const each = once + program.once_memory * 2 * kVector;
    for (size_t n = 0; n < program.steps.size(); ++n) {
      const program::Step& step = program.steps[n];
      const int64_t lane = step.by_lane ? kVector : 0;
      data_[n] = step.by_row ? StepData{each + step.memory * kRows * 2 * kVector, 2 * kVector, lane}
                             : StepData{once + step.memory * 2 * kVector, 0, lane};
    }
    for (int n : program.once) run(n, 0, 1);
  }

  static int64_t data_bytes(const program::Compiled& program) {
    const auto bytes = int64_t(program.steps.size() * sizeof(StepData));
    return (bytes + kVector - 1) / kVector * kVector;
  }
  static size_t memory_bytes(const program::Compiled& program) {
    return size_t(data_bytes(program) +
                  (program.once_memory + program.each_memory * kRows) * 2 * kVector + kVector);
  }

  // Runs the rest for `keys` keys. finish(key, rows) is called for every few rows, counted from the
  // tile's first: result() then has theirs.
  template <class Finish>
  void run_rows(int64_t keys, const Finish& finish) {
    for (int64_t row = 0; row < keys; row += kRows) {
      const int64_t rows = std::min(kRows, keys - row);
      for (int n : program_.each) run(n, row, rows);
      finish(row, rows);
    }
  }
  const StepData& result(int step) const { return data_[step]; }
  int64_t vectors() const { return tile_.lanes / kLanes<T>; }

  // to [rows x lanes], of the tile, = the result of a step.
  void store_result(int step, int64_t rows, T* to) const {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t v = 0; v < vectors(); ++v)
        store(to + r * tile_.step + v * kLanes<T>, load(data_[step].at<T>(r, v)));
  }

 private:
  const StepData& operand(int n) const { return n < 0 ? data_[0] : data_[n]; }

  // A step, for rows [row, row + rows) of the tile.
  void run(int n, int64_t row, int64_t rows) {
    const program::Step& step = program_.steps[size_t(n)];
    const program::Instruction& x = step.instruction;
    const StepSize size{rows, step.by_lane ? vectors() : 1};
    StepData& to = data_[n];
    if (begin(x, row, size, to)) return;
    const StepData &a = operand(x.a), &b = operand(x.b), &c = operand(x.c);
    if (x.op == program::Op::load || x.op == program::Op::load_direction)
      return load_elements(x, size, to, a);
    const program::Type from = program_.steps[size_t(x.a)].instruction.type;
    if (x.op == program::Op::to_real || x.op == program::Op::to_integer)
      return convert<T>(x.type, from, size, to, a);
    if (run_bits<T>(x, size, to, a, b, c) || run_comparison<T>(x, from, size, to, a, b)) return;
    if (x.type != program::Type::real)
      run_integer<T>(x, size, to, a, b, c);
    else if (!run_real<T>(x, size, to, a, b, c))
      run_real_by_lane<T>(x, size, to, a, b);
  }

  void load_elements(const program::Instruction& x, const StepSize& size, const StepData& to,
                     const StepData& place) const {
    if (x.type == program::Type::integer)
      return load_integers_of<T>(indices_ + x.integer, size, to, place);
    const T* const table = x.op == program::Op::load ? tables_ : given_.direction;
    load_reals<T>(table ? table + x.integer : nullptr, size, to, place);
  }

  // Steps without operands. What is in a tile already is read where it is.
  bool begin(const program::Instruction& x, int64_t row, const StepSize& size, StepData& to) {
    using program::Op;
    const auto of_tile = [&](const T* tile) {
      to = {const_cast<char*>(reinterpret_cast<const char*>(tile + row * tile_.step)),
            tile_.step * int64_t(sizeof(T)), kVector};
      return true;
    };
    const auto each = [&](auto f) QKV_INLINE_LAMBDA {
      for (int64_t r = 0; r < size.rows; ++r)
        for (int64_t v = 0; v < size.vectors; ++v) store(to.at<T>(r, v), (Vec<T>)f(r, v));
      return true;
    };
    const auto same = [&](int64_t number)
                          QKV_INLINE_LAMBDA { return IntVec<T>{} + IntLane<T>(number); };
    switch (x.op) {
      case Op::score:
        return of_tile(given_.score);
      case Op::change:
        return of_tile(given_.change);
      case Op::grad:
        return of_tile(given_.grad);
      case Op::grad_change:
        return of_tile(given_.grad_change);
      case Op::constant:
        return each([&](int64_t, int64_t) QKV_INLINE_LAMBDA {
          return x.type == program::Type::real ? splat(T(x.real)) : (Vec<T>)same(x.integer);
        });
      case Op::batch:
        return each([&](int64_t, int64_t) QKV_INLINE_LAMBDA { return same(item_); });
      case Op::head:
        return each([&](int64_t, int64_t v) QKV_INLINE_LAMBDA { return heads(v); });
      case Op::query:
        return each([&](int64_t, int64_t v) QKV_INLINE_LAMBDA { return queries(v); });
      case Op::key:
        return each([&](int64_t r, int64_t)
                        QKV_INLINE_LAMBDA { return same(key_ + row + r + p_.shard.key_offset); });
      default:
        return false;
    }
  }

  // The numbers of the heads, and of the queries, of a vector of lanes.
  QKV_INLINE IntVec<T> heads(int64_t vector) const {
    const int64_t first = p_.shard.head_offset + tile_.plane.kv_head * p_.group();
    IntVec<T> all{};
    for (int l = 0; l < kLanes<T>; ++l)
      all[l] = IntLane<T>(first + (tile_.row + vector * kLanes<T> + l) % p_.group());
    return all;
  }
  QKV_INLINE IntVec<T> queries(int64_t vector) const {
    const int64_t first =
        p_.function->from_last ? p_.bottom_right() + p_.shard.key_offset : p_.shard.query_offset;
    IntVec<T> all{};
    for (int l = 0; l < kLanes<T>; ++l) {
      // Lanes without a row are given the last row's, for which tables have an element.
      const int64_t lane = std::min<int64_t>(vector * kLanes<T> + l, tile_.rows - 1);
      all[l] = IntLane<T>(first + (tile_.row + lane) / p_.group());
    }
    return all;
  }

  const Problem& p_;
  const program::Compiled& program_;
  const Tile& tile_;
  const int64_t key_;
  ProgramTile<T> given_;
  int64_t item_ = 0;
  const T* tables_ = nullptr;
  const int32_t* indices_ = nullptr;
  StepData* data_ = nullptr;  // of each step
};

}  // namespace qkv::QKV_ISA
