// A function of the caller's own, as a program (score_program.h).
#pragma once

#include "kernels/score/interpreter.h"
#include "kernels/score/option.h"

namespace qkv::QKV_ISA {

// The most bytes on the stack. Programs have a few dozen results, and threads megabytes; but second
// derivatives of 4000 instructions did not fit into 8 MiB, and where bits are fixed, results of all
// rows of a tile at once may take as much.
constexpr size_t kStackBytes = size_t(256) << 10;

// Calls use(interpreter), which lives as long as the call. Not inlined, since a loop around it
// would take memory of the stack again and again.
template <class T, class Use>
__attribute__((noinline)) void interpret(const Problem& p, const program::Compiled& program,
                                         const Tile& tile, int64_t key, const ProgramTile<T>& given,
                                         const Use& use) {
  const size_t bytes = Interpreter<T>::memory_bytes(program);
  const auto use_with = [&](void* memory) {
    Interpreter<T> interpreter(p, program, tile, key, given, static_cast<char*>(memory));
    use(interpreter);
  };
  if (kFixedBits || bytes > kStackBytes)
    use_with(Buffer(bytes).data());
  else
    use_with(__builtin_alloca_with_align(bytes, kVectorBytes * 8));
}

// to [keys x lanes] = the only result of a program. It may be one of the tiles that are given.
template <class T>
void run_program(const Problem& p, const program::Compiled& program, const Tile& tile, int64_t key,
                 int64_t keys, const ProgramTile<T>& given, T* to) {
  interpret<T>(p, program, tile, key, given, [&](Interpreter<T>& of) {
    of.run_rows(keys, to, [&](int64_t row, int64_t rows) {
      if (program.in_place < 0) of.store_result(program.results[0], rows, to + row * tile.step);
    });
  });
}

// Adds the values of `rows` rows of a tile, from `row` on, to the gradient of tables.
template <class T, class Sum>
void add_to_tables(const program::Compiled& program, const Interpreter<T>& of, int64_t row,
                   int64_t rows, Sum* sums) {
  for (const program::TableSum& sum : program.sums) {
    const program::Step& place = program.steps[size_t(sum.place)];
    const TableAdder<T, Sum> adder{sums + sum.offset, rows, of.vectors(), place.by_row,
                                   of.by_lane(place)};
    if (const Line<T>* const line = of.line(place))
      adder.add_line(*line, of.follows(*line, sum.offset), row, of.result(sum.value));
    else
      adder.add(of.result(sum.place), of.result(sum.value));
  }
}

// The same where bits are fixed, of all keys of a tile: row after row, and of a row key after key,
// so that it does not matter how many rows a tile has.
template <class T, class Sum>
void add_in_order(const program::Compiled& program, const Interpreter<T>& of, int rows,
                  int64_t keys, Sum* sums) {
  for (int lane = 0; lane < rows; ++lane)
    for (const program::TableSum& sum : program.sums) {
      const int v = lane / kLanes<T>, l = lane % kLanes<T>;
      const StepData value = of.result(sum.value), place = of.result(sum.place);
      const Line<T>* const line = of.line(program.steps[size_t(sum.place)]);
      for (int64_t j = 0; j < keys; ++j) {
        const int64_t to =
            line ? line->first[v][l] + j * line->per_key : place.at<IntLane<T>>(j, v)[l];
        if (to >= 0) sums[sum.offset + to] += value.at<T>(j, v)[l];
      }
    }
}

// Sets the lanes of a tile [keys x lanes] that have no row to 0.
template <class T>
void clear_lanes_without_row(const Tile& tile, int64_t keys, T* numbers) {
  for (int64_t j = 0; j < keys; ++j)
    std::fill(numbers + j * tile.step + tile.rows, numbers + j * tile.step + tile.lanes, T(0));
}

// The results of a backward program, in place of the gradients that it is given; and what it adds
// to the gradient of tables. Lanes without a row have scores, too, those of a query of zeros, and
// where these are so large that their exponential is infinite, gradients that are NaN.
template <class T, int N>
void run_backward(const Problem& p, const program::Compiled& program, const BackwardItem& item,
                  const Tile& tile, int64_t key, int64_t keys, const ProgramTile<T>& given,
                  T* const (&gradients)[N]) {
  void* const sums = item.tables;
  for (T* const numbers : gradients)
    if (sums && !kFixedBits) clear_lanes_without_row(tile, keys, numbers);
  interpret<T>(p, program, tile, key, given, [&](Interpreter<T>& of) {
    const auto add = [&](int64_t row, int64_t rows, auto* to) {
      if constexpr (kFixedBits)
        add_in_order(program, of, tile.rows, rows, to);
      else
        add_to_tables(program, of, row, rows, to);
    };
    of.run_rows(keys, gradients[0], [&](int64_t row, int64_t rows) {
      if (sums && p.function->program->sums_in_double())
        add(row, rows, static_cast<double*>(sums));
      else if (sums)
        add(row, rows, static_cast<T*>(sums));
      for (int n = 0; program.in_place < 0 && n < N; ++n)
        of.store_result(program.results[size_t(n)], rows, gradients[n] + row * tile.step);
    });
  });
}

// What it keeps of a score is what it was given.
struct Program : ScoreOption<Program> {
  static constexpr bool kKeeps = true;

  static bool is_set(const Problem& p) { return p.function; }
  static bool moves(const JvpArgs& a) { return a.tables; }

  template <class T>
  static void apply(const Problem& p, const Tile& tile, int64_t key, int64_t keys, T* scores,
                    T* before) {
    for (int64_t j = 0; before && j < keys; ++j)
      std::copy_n(scores + j * tile.step, tile.lanes, before + j * tile.step);
    run_program<T>(p, p.function->program->forward(), tile, key, keys, {.score = scores}, scores);
  }
  template <class T>
  static void jvp(const Problem& p, const JvpArgs& a, const Tile& tile, int64_t key, int64_t keys,
                  const T* before, T* change) {
    run_program<T>(p, p.function->program->jvp(), tile, key, keys,
                   {.score = before, .change = change, .direction = direction_of<T>(a)}, change);
  }
  template <class T>
  static void backward(const Problem& p, const BackwardArgs&, const BackwardItem& item,
                       const Tile& tile, int64_t key, int64_t keys, const T* before,
                       T* grad_scores) {
    run_backward<T>(p, p.function->program->backward(), item, tile, key, keys,
                    {.score = before, .grad = grad_scores}, {grad_scores});
  }
  template <class T>
  static void double_backward(const Problem& p, const BackwardArgs& a, const BackwardItem& item,
                              const Tile& tile, int64_t key, int64_t keys, const T* before,
                              const T* change, T* first, T* second) {
    run_backward<T>(p, p.function->program->double_backward(), item, tile, key, keys,
                    {.score = before,
                     .change = change,
                     .grad = first,
                     .grad_change = second,
                     .direction = direction_of<T>(a.direction->along)},
                    {first, second});
  }

 private:
  template <class T>
  static const T* direction_of(const JvpArgs& a) {
    return static_cast<const T*>(a.tables);
  }
};

}  // namespace qkv::QKV_ISA
