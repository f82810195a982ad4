// A score program by torch's operators, for derivatives that no kernel has.
#include <ATen/ATen.h>

#include "call/scores.h"
#include "ops/attention/attention.h"
#include "program/builder.h"

namespace qkv::ops {
namespace {

using program::Instruction;
using program::Op;
using program::Type;

constexpr std::pair<Op, at::Tensor (*)(const at::Tensor&)> kOfOne[] = {
    {Op::neg, at::neg},   {Op::abs, at::abs},     {Op::exp, at::exp},
    {Op::log, at::log},   {Op::tanh, at::tanh},   {Op::sigmoid, at::sigmoid},
    {Op::sqrt, at::sqrt}, {Op::rsqrt, at::rsqrt}, {Op::sin, at::sin},
    {Op::cos, at::cos},   {Op::floor, at::floor}, {Op::logical_not, at::bitwise_not},
};

at::Tensor add(const at::Tensor& a, const at::Tensor& b) { return a.add(b); }
at::Tensor sub(const at::Tensor& a, const at::Tensor& b) { return a.sub(b); }

constexpr std::pair<Op, at::Tensor (*)(const at::Tensor&, const at::Tensor&)> kOfTwo[] = {
    {Op::add, add},
    {Op::sub, sub},
    {Op::mul, at::mul},
    {Op::div, at::div},
    {Op::min, at::minimum},
    {Op::max, at::maximum},
    {Op::eq, at::eq},
    {Op::ne, at::ne},
    {Op::lt, at::lt},
    {Op::le, at::le},
    {Op::gt, at::gt},
    {Op::ge, at::ge},
    {Op::logical_and, at::bitwise_and},
    {Op::logical_or, at::bitwise_or},
    {Op::logical_xor, at::bitwise_xor},
    {Op::shl, at::bitwise_left_shift},
    {Op::shr, at::bitwise_right_shift},
};

class ComposedProgram {
 public:
  ComposedProgram(const Call& call, const at::Tensor& scores) : call_(call), scores_(scores) {}

  at::Tensor run(const ScoreProgram& program) {
    const program::Builder& all = program.instructions();
    for (int n = 0; n <= program.result(); ++n) results_.push_back(result_of(all[n]));
    return results_.back().expand_as(scores_);
  }

 private:
  at::Tensor number(const c10::Scalar& x, at::ScalarType dtype) const {
    return at::scalar_tensor(x, scores_.options().dtype(dtype));
  }

  // 0, 1, ... along a dimension, counted from the right; of the batch, over all of its dimensions.
  at::Tensor numbers(int64_t dim) const {
    auto sizes = scores_.sym_sizes().vec();
    for (size_t i = 0; i < sizes.size(); ++i)
      if (const int64_t own = int64_t(sizes.size() - 1 - i); dim < 3 ? own != dim : own < 3)
        sizes[i] = 1;
    const auto ones = at::ones_symint(sizes, scores_.options().dtype(at::kInt));
    return ones.flatten().cumsum(0, at::kInt).sub(1).view_symint(sizes);
  }

  // Of a batch item: which row of the tables it reads, and its number in that row's part.
  std::pair<at::Tensor, at::Tensor> rows_and_items() const {
    c10::SymInt rows = 1, items = 1;
    for (const Argument argument : {arg::score_tables, arg::score_indices})
      if (call_.has(argument) && call_[argument].dim() > 1)
        rows = std::max(rows, call_[argument].sym_size(0));
    for (int64_t d = 3; d < scores_.dim(); ++d)
      items = items * scores_.sym_size(scores_.dim() - 1 - d);
    const c10::Scalar each(items / rows);
    const at::Tensor batch = numbers(3);
    return {batch.floor_divide(each), batch.remainder(each)};
  }

  at::Tensor load(const Instruction& x, const at::Tensor& place) const {
    const bool is_real = x.type == Type::real;
    const at::Tensor& table = call_[is_real ? arg::score_tables : arg::score_indices];
    at::Tensor index = place.add(c10::Scalar(x.integer)).clamp_min(0).to(at::kLong);
    if (table.dim() > 1 && table.sym_size(0) != 1)
      index = index.add(rows_and_items().first.mul(c10::Scalar(table.sym_size(-1))));
    const at::Tensor found = table.flatten().index({index});
    return at::where(place.ge(0), found,
                     is_real ? number(NAN, found.scalar_type()) : number(0, at::kInt));
  }

  at::Tensor place(const Instruction& x, const at::Tensor& at) const {
    const at::Tensor index = at::where(at.lt(0), at.add(c10::Scalar(x.integer)), at);
    const at::Tensor inside = index.ge(0).logical_and(index.lt(c10::Scalar(x.integer)));
    return at::where(inside, index.mul(c10::Scalar(x.stride)), number(program::kOutside, at::kInt));
  }

  at::Tensor input(const Instruction& x) const {
    switch (x.op) {
      case Op::score:
        return scores_;
      case Op::batch:
        return rows_and_items().second;
      case Op::head:
        return numbers(2);
      case Op::query:
        return numbers(1);
      case Op::key:
        return numbers(0);
      default:
        break;
    }
    if (x.type == Type::real) return number(x.real, scores_.scalar_type());
    if (x.type == Type::boolean) return number(x.integer != 0, at::kBool);
    return number(x.integer, at::kInt);
  }

  // Quotients of integers by 0 are 0, which torch refuses.
  template <class Divide>
  at::Tensor divided(const at::Tensor& a, const at::Tensor& b, const Divide& divide) const {
    if (a.is_floating_point()) return divide(a, b);
    const at::Tensor zero = b.eq(0);
    return divide(a, b.masked_fill(zero, 1)).masked_fill(zero, 0).to(at::kInt);
  }

  at::Tensor result_of(const Instruction& x) const {
    if (x.a < 0) return input(x);
    const at::Tensor& a = results_[size_t(x.a)];
    const at::Tensor& b = results_[size_t(std::max(x.b, 0))];
    for (const auto& [op, of_one] : kOfOne)
      if (x.op == op) return of_one(a);
    for (const auto& [op, of_two] : kOfTwo)
      if (x.op == op) return of_two(a, b);
    switch (x.op) {
      case Op::floordiv:
        return divided(a, b, [](const auto& p, const auto& q) { return p.floor_divide(q); });
      case Op::rem:
        return divided(a, b, [](const auto& p, const auto& q) { return p.remainder(q); });
      case Op::where:
        return at::where(a, b, results_[size_t(x.c)]);
      case Op::to_real:
        return a.to(scores_.scalar_type());
      case Op::to_integer:
        return a.to(at::kInt);
      case Op::place:
        return place(x, a);
      case Op::join_places:
        return at::where(a.bitwise_or(b).lt(0), number(program::kOutside, at::kInt), a.add(b));
      case Op::load:
        return load(x, a);
      default:
        TORCH_INTERNAL_ASSERT(false, "a score program has an instruction of its derivatives");
    }
  }

  const Call& call_;
  const at::Tensor& scores_;
  std::vector<at::Tensor> results_;
};

}  // namespace

at::Tensor apply_score_program(const Call& call, const at::Tensor& scores) {
  if (call.options.score_program.empty()) return scores;
  return ComposedProgram(call, scores).run(*score_program_of(call));
}

}  // namespace qkv::ops
