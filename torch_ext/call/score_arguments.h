// The arguments that act on scores, by what the kernels of attention call them.
#pragma once

#include "call/arguments.h"

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

}  // namespace qkv
