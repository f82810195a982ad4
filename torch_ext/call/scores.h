// What acts on scores: the arguments, by what the kernels of attention call them, and the score
// programs of calls (csrc/score_program.h), read once for each text.
#pragma once

#include <memory>

#include "call/check.h"
#include "score_program.h"

namespace qkv {

constexpr int differentiable_of(Shape shape) {
  int n = 0;
  for (int i = 0; i < arg::kDifferentiable; ++i) n += kArguments[i].shape == shape;
  return n;
}
// The differentiable arguments of this shape, in their order.
template <Shape shape>
constexpr auto arguments_of() {
  std::array<Argument, differentiable_of(shape)> found{};
  for (int i = 0, n = 0; i < arg::kDifferentiable; ++i)
    if (kArguments[i].shape == shape) found[n++] = Argument(i);
  return found;
}
// Those that are added to the scores, or hide them: Problem::masks.
inline constexpr auto kMaskArguments = arguments_of<Shape::mask>();
// Those of which each head has a number: Problem::by_head, in the order of HeadNumber.
inline constexpr auto kHeadArguments = arguments_of<Shape::per_head>();

// Of option score_program. Throws c10::ValueError for a text that is no program.
std::shared_ptr<const ScoreProgram> score_program_of(const Call& call);

// That score_tables and score_indices, which are [N] or [R, N], have what the program reads, and a
// row for all batch items or for each of R equal parts of them.
template <class T>
void check_score_program(const Call& call, const Sizes<T>& sizes);

}  // namespace qkv
