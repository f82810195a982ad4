#include "program/compiled.h"

#include <algorithm>

namespace qkv::program {
namespace {

bool begins_by_row(Op op) {
  return op == Op::key || op == Op::score || (op >= Op::change && op <= Op::grad_change);
}
bool begins_by_lane(Op op) { return op == Op::query || (begins_by_row(op) && op != Op::key); }

Kind kind_of(const Instruction& x) {
  if (x.op <= Op::constant) return Kind::begins;
  if (x.op == Op::load || x.op == Op::load_direction) return Kind::loads;
  if (x.op == Op::to_real || x.op == Op::to_integer) return Kind::converts;
  if (x.op >= Op::eq && x.op <= Op::ge) return Kind::compares;
  return x.op >= Op::logical_and || x.type == Type::integer ? Kind::bits : Kind::reals;
}

// Step::per_key of a step whose operands are among `steps`. A tile has fewer than 2^10 keys, so
// that within one no integer grows by 2^30, and two that are elements of a table say whether it has
// wrapped between them.
std::optional<int64_t> per_key_of(const std::vector<Step>& steps, const Step& step) {
  const Instruction& x = step.instruction;
  const auto operand = [&](int n) -> const Step& { return steps[size_t(n)]; };
  const auto of = [&](int n) { return operand(n).per_key; };
  if (x.type != Type::integer) return {};
  if (!step.by_row) return 0;
  std::optional<int64_t> all;
  const auto sum = [&](int64_t sign) {
    if (of(x.a) && of(x.b)) all = *of(x.a) + sign * *of(x.b);
  };
  const auto is_small = [](int64_t by) { return by > -(1 << 20) && by < 1 << 20; };
  const auto product = [&](int n, const Instruction& by) {
    if (of(n) && by.op == Op::constant && is_small(by.integer)) all = *of(n) * by.integer;
  };
  if (x.op == Op::key) all = 1;
  if (x.op == Op::add) sum(1);
  if (x.op == Op::sub) sum(-1);
  if (x.op == Op::neg && of(x.a)) all = -*of(x.a);
  if (x.op == Op::mul) product(x.a, operand(x.b).instruction);
  if (x.op == Op::mul && !all) product(x.b, operand(x.a).instruction);
  if (x.op == Op::place && of(x.a)) all = *of(x.a) * x.stride;
  // Of two places that depend on the key, what wraps in one could make up for the other.
  if (x.op == Op::join_places && !(operand(x.a).by_row && operand(x.b).by_row)) sum(1);
  return all && is_small(*all) ? all : std::nullopt;
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
    Step step{.instruction = x,
              .kind = kind_of(x),
              .from = x.a < 0 ? x.type : program[x.a].type,
              .by_row = begins_by_row(x.op),
              .by_lane = begins_by_lane(x.op),
              .by_head = x.op == Op::head,
              .per_key = {}};
    for (int* operand : {&step.instruction.a, &step.instruction.b, &step.instruction.c}) {
      if (*operand < 0) continue;
      *operand = step_of[size_t(*operand)];
      step.by_row |= steps[size_t(*operand)].by_row;
      step.by_lane |= steps[size_t(*operand)].by_lane;
      step.by_head |= steps[size_t(*operand)].by_head;
    }
    step.per_key = per_key_of(steps, step);
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
    for_each_operand(step.instruction, [&](int m) {
      if (last[size_t(m)] != n || !compiled.steps[size_t(m)].by_row) return;
      free.push_back(compiled.steps[size_t(m)].memory);
      last[size_t(m)] = 0;  // twice an operand, freed once
    });
    if (last[size_t(n)] < 0) free.push_back(step.memory);
  }
  return pieces;
}

// Of the steps of `each`, in their order, those that these steps need; without what is before lines
// if is_made says that they are.
std::vector<int> needed_of(const Compiled& compiled, const std::vector<int>& roots, bool is_made) {
  std::vector<bool> needed(compiled.steps.size());
  for (int root : roots) needed[size_t(root)] = true;
  for (size_t n = compiled.steps.size(); n-- > 0;)
    if (needed[n] && !(is_made && compiled.steps[n].line >= 0))
      for_each_operand(compiled.steps[n].instruction,
                       [&](int operand) { needed[size_t(operand)] = true; });
  std::vector<int> found;
  for (int n : compiled.each)
    if (needed[size_t(n)] && !(is_made && compiled.steps[size_t(n)].line >= 0)) found.push_back(n);
  return found;
}

// Finds lines: places of tables of reals. `kept` are the results, and what is added to tables.
void find_lines(Compiled& compiled, const std::vector<int>& kept) {
  std::vector<int> lines;
  const auto found = [&](int place) {
    Step& of = compiled.steps[size_t(place)];
    if (!of.per_key || !of.by_row || !of.by_lane || of.line >= 0) return;
    of.line = int(lines.size());
    lines.push_back(place);
  };
  for (int n : compiled.each)
    if (const Instruction& x = compiled.steps[size_t(n)].instruction;
        compiled.steps[size_t(n)].kind == Kind::loads && x.type == Type::real)
      found(x.a);
  for (const TableSum& sum : compiled.sums) found(sum.place);
  compiled.lines = int(lines.size());
  compiled.of_lines = needed_of(compiled, lines, false);
  compiled.beside_lines = needed_of(compiled, kept, true);
  // A place may be an operand of something else than a table of reals: then it is made as ever.
  const auto reads_line = [&](int n) {
    const Step& step = compiled.steps[size_t(n)];
    if (step.kind == Kind::loads && step.instruction.type == Type::real) return false;
    bool reads = false;
    for_each_operand(step.instruction,
                     [&](int operand) { reads |= compiled.steps[size_t(operand)].line >= 0; });
    return reads;
  };
  if (std::none_of(compiled.beside_lines.begin(), compiled.beside_lines.end(), reads_line)) return;
  for (int n : lines) compiled.steps[size_t(n)].line = -1;
  compiled.lines = 0;
}

// Compiled::in_place.
int in_place_of(const Compiled& compiled) {
  const int n = compiled.results[0];
  const Step& step = compiled.steps[size_t(n)];
  const bool is_summed =
      std::any_of(compiled.sums.begin(), compiled.sums.end(),
                  [&](const TableSum& sum) { return sum.value == n || sum.place == n; });
  const bool is_last = !compiled.each.empty() && compiled.each.back() == n;
  return is_last && compiled.results.size() == 1 && step.by_lane && step.kind > Kind::loads &&
                 !is_summed
             ? n
             : -1;
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
  find_lines(compiled, kept);
  compiled.in_place = in_place_of(compiled);
  return compiled;
}

}  // namespace qkv::program
