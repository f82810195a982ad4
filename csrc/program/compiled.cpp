#include "program/compiled.h"

#include <algorithm>

namespace qkv::program {
namespace {

bool begins_by_row(Op op) {
  return op == Op::key || op == Op::score || (op >= Op::change && op <= Op::grad_change);
}
bool begins_by_lane(Op op) {
  return op == Op::query || op == Op::head || (begins_by_row(op) && op != Op::key);
}

template <class Each>
void for_each_operand(const Instruction& x, const Each& each) {
  for (int operand : {x.a, x.b, x.c})
    if (operand >= 0) each(operand);
}

// The instructions that others need, in their order, with operands as numbers of steps.
std::vector<Step> steps_of(const Builder& program, const std::vector<int>& roots,
                           std::vector<int>& step_of) {
  std::vector<bool> needed(size_t(program.size()));
  for (int root : roots) needed[size_t(root)] = true;
  for (int n = program.size() - 1; n >= 0; --n)
    if (needed[size_t(n)])
      for_each_operand(program[n], [&](int operand) { needed[size_t(operand)] = true; });
  std::vector<Step> steps;
  step_of.assign(size_t(program.size()), -1);
  for (int n = 0; n < program.size(); ++n) {
    if (!needed[size_t(n)]) continue;
    Instruction x = program[n];
    Step step{x, begins_by_row(x.op), begins_by_lane(x.op)};
    for (int* operand : {&step.instruction.a, &step.instruction.b, &step.instruction.c}) {
      if (*operand < 0) continue;
      *operand = step_of[size_t(*operand)];
      step.by_row |= steps[size_t(*operand)].by_row;
      step.by_lane |= steps[size_t(*operand)].by_lane;
    }
    step_of[size_t(n)] = int(steps.size());
    steps.push_back(step);
  }
  return steps;
}

// Gives each step that is run for some rows a piece of memory, which the next one takes over once
// nothing needs the result any more.
int share_memory(Compiled& compiled, const std::vector<int>& kept) {
  std::vector<int> last(compiled.steps.size(), -1);
  for (int n : compiled.each)
    for_each_operand(compiled.steps[size_t(n)].instruction,
                     [&](int operand) { last[size_t(operand)] = n; });
  for (int n : kept) last[size_t(n)] = int(compiled.steps.size());
  std::vector<int> free;
  int pieces = 0;
  for (int n : compiled.each) {
    Step& step = compiled.steps[size_t(n)];
    if (free.empty()) free.push_back(pieces++);
    step.memory = free.back(), free.pop_back();
    for (int m : compiled.each)
      if (m <= n && last[size_t(m)] == n) free.push_back(compiled.steps[size_t(m)].memory);
    if (last[size_t(n)] < 0) free.push_back(step.memory);
  }
  return pieces;
}

}  // namespace

Compiled compile(const Builder& program, const std::vector<int>& results,
                 const std::vector<TableGradient>& tables) {
  std::vector<int> roots = results, step_of;
  for (const TableGradient& of : tables) {
    roots.push_back(program[of.load].a);
    roots.push_back(of.value);
  }
  Compiled compiled;
  compiled.steps = steps_of(program, roots, step_of);
  const auto step = [&](int instruction) { return step_of[size_t(instruction)]; };
  for (int n : results) compiled.results.push_back(step(n));
  for (const TableGradient& of : tables)
    compiled.sums.push_back({step(program[of.load].a), step(of.value), program[of.load].integer});
  for (int n = 0; n < int(compiled.steps.size()); ++n) {
    Step& of = compiled.steps[size_t(n)];
    if (of.by_row) {
      compiled.each.push_back(n);
    } else {
      of.memory = compiled.once_memory++;
      compiled.once.push_back(n);
    }
  }
  std::vector<int> kept;
  for (int root : roots) kept.push_back(step(root));
  compiled.each_memory = share_memory(compiled, kept);
  return compiled;
}

}  // namespace qkv::program
