#include "score_program.h"

#include <algorithm>
#include <cmath>

#include "program/compiled.h"
#include "program/parse.h"

namespace qkv {
namespace program {
namespace {

bool has_infinity(const Compiled& compiled) {
  return std::any_of(compiled.steps.begin(), compiled.steps.end(), [](const Step& step) {
    const Instruction& x = step.instruction;
    return x.op == Op::constant && x.type == Type::real && std::isinf(x.real) && x.real < 0;
  });
}

// `value` where one of these gradients is not 0. A pair whose gradient is 0, as that of every
// hidden pair, so adds nothing, even where a derivative is not finite.
int where_any(Builder& b, const std::vector<int>& gradients, int value) {
  if (value < 0) return b.real(0);
  if (std::find(gradients.begin(), gradients.end(), value) != gradients.end()) return value;
  const int zero = b.real(0);
  int any = -1;
  for (int gradient : gradients) {
    const int is = b.compare(Op::ne, gradient, zero);
    any = any < 0 ? is : b.make(Op::logical_or, any, is);
  }
  return b.make(Op::where, any, value, zero);
}

Compiled jvp_of(Builder b, int result) {
  const int change = changes(b)[size_t(result)];
  return compile(b, {change < 0 ? b.real(0) : change});
}

Compiled backward_of(Builder b, int result) {
  const int grad = b.input(Op::grad);
  Gradients of = gradients(b, result, grad);
  for (TableGradient& table : of.tables) table.value = where_any(b, {grad}, table.value);
  return compile(b, {where_any(b, {grad}, of.score)}, of.tables);
}

Compiled double_backward_of(Builder b, int result) {
  const int grad = b.input(Op::grad), grad_change = b.input(Op::grad_change);
  const Gradients of = gradients(b, result, grad);
  const int first = of.score < 0 ? b.real(0) : of.score;
  const std::vector<int> moved = changes(b);
  std::vector<TableGradient> tables;
  for (const TableGradient& table : of.tables)
    if (const int change = moved[size_t(table.value)]; change >= 0)
      tables.push_back({table.load, where_any(b, {grad, grad_change}, change)});
  const int second = where_any(b, {grad, grad_change}, moved[size_t(first)]);
  return compile(b, {where_any(b, {grad}, first), second}, tables);
}

}  // namespace
}  // namespace program

struct ScoreProgram::Parts {
  program::Parsed parsed;
  bool hides;
  program::Compiled forward, jvp, backward, double_backward;
};

ScoreProgram::ScoreProgram(std::string_view text) {
  const program::Parsed parsed = program::parse(text);
  const program::Builder& b = parsed.builder;
  const int result = parsed.result;
  program::Compiled forward = program::compile(b, {result});
  const bool hides = program::has_infinity(forward);
  parts_.reset(new Parts{parsed, hides, std::move(forward), program::jvp_of(b, result),
                         program::backward_of(b, result), program::double_backward_of(b, result)});
}
ScoreProgram::~ScoreProgram() = default;

int64_t ScoreProgram::table_size() const { return parts_->parsed.reals; }
int64_t ScoreProgram::index_size() const { return parts_->parsed.integers; }
bool ScoreProgram::hides() const { return parts_->hides; }
const program::Builder& ScoreProgram::instructions() const { return parts_->parsed.builder; }
int ScoreProgram::result() const { return parts_->parsed.result; }
const program::Compiled& ScoreProgram::forward() const { return parts_->forward; }
const program::Compiled& ScoreProgram::jvp() const { return parts_->jvp; }
const program::Compiled& ScoreProgram::backward() const { return parts_->backward; }
const program::Compiled& ScoreProgram::double_backward() const { return parts_->double_backward; }

}  // namespace qkv
