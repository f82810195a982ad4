#include "qkv/score_expression.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <iomanip>
#include <locale>
#include <map>
#include <sstream>

#include "program/parse.h"

namespace qkv::scores {

struct Node {
  Type type;
  std::string text;  // of the instruction, before its operands
  std::vector<Expression> operands;
  at::Tensor table;  // of "load"
  int depth;         // how many instructions there are up to this one, in the longest line of them
};

namespace {

// An expression is walked through and taken down by functions that call themselves, so that no
// stack has room for one that is deeper than the longest program by far.
Expression make(Type type, std::string text, std::vector<Expression> operands = {},
                at::Tensor table = {}) {
  int depth = 1;
  for (const Expression& x : operands) depth = std::max(depth, x.node()->depth + 1);
  TORCH_CHECK_VALUE(depth <= 4096,
                    "a score function has more than 4096 operations, each of which "
                    "has the result of the one before as an operand; a program has at most 4096");
  return Expression(std::make_shared<const Node>(
      Node{type, std::move(text), std::move(operands), std::move(table), depth}));
}

constexpr const char* kTypes[] = {"real", "an integer", "a boolean"};

Expression as_real(const Expression& x) {
  return x.type() == Type::real ? x : make(Type::real, "to_float", {x});
}

// The lines of an expression, in which none stands twice, and the tables that it reads. Not by
// c10::str, whose stream writes 1,024 in the locale of some programs.
class Program {
 public:
  int add(const Expression& x) {
    if (const auto found = numbers_.find(x.node().get()); found != numbers_.end())
      return found->second;
    const Node& node = *x.node();
    std::string line = node.text;
    if (node.table.defined()) line.append(" ").append(std::to_string(table(node.table)));
    for (const Expression& operand : node.operands)
      line.append(" ").append(std::to_string(add(operand)));
    const auto [same, is_new] = lines_.emplace(line, int(lines_.size()));
    if (is_new) text_ += line + "\n";
    return numbers_[x.node().get()] = same->second;
  }

  const std::string text() const { return heads_ + text_; }
  const std::vector<at::Tensor>& reals() const { return reals_; }
  const std::vector<at::Tensor>& integers() const { return integers_; }

 private:
  int table(const at::Tensor& tensor) {
    for (size_t n = 0; n < tables_.size(); ++n)
      if (tables_[n].is_same(tensor)) return int(n);
    const bool is_real = tensor.is_floating_point();
    int64_t& offset = is_real ? reals_size_ : integers_size_;
    heads_.append(is_real ? "@float " : "@int ").append(std::to_string(offset));
    for (const int64_t size : tensor.sizes()) heads_.append(" ").append(std::to_string(size));
    heads_ += "\n";
    offset += tensor.numel();
    (is_real ? reals_ : integers_).push_back(tensor.flatten());
    tables_.push_back(tensor);
    return int(tables_.size()) - 1;
  }

  std::string heads_, text_;
  std::map<const Node*, int> numbers_;
  std::map<std::string, int> lines_;
  std::vector<at::Tensor> tables_, reals_, integers_;
  int64_t reals_size_ = 0, integers_size_ = 0;
};

at::Tensor joined(const std::vector<at::Tensor>& tensors, at::ScalarType dtype) {
  if (tensors.empty()) return {};
  for (const at::Tensor& tensor : tensors)  // integers of 64 bits may not fit
    TORCH_CHECK_VALUE(tensor.scalar_type() != at::kLong || !tensor.device().is_cpu() ||
                          tensor.eq(tensor.to(dtype)).all().item<bool>(),
                      "a table of int64 has a number that int32 does not have, in which integers ",
                      "are computed");
  return (tensors.size() == 1 ? tensors[0] : at::cat(tensors)).to(dtype);
}

}  // namespace

Type Expression::type() const { return node_->type; }

Expression Expression::constant(Type type, const std::string& text) {
  constexpr const char* kNames[] = {"float ", "int ", "bool "};
  return make(type, kNames[int(type)] + text);
}

Expression Expression::of_double(double x) {
  std::ostringstream text;
  text.imbue(std::locale::classic());  // the program's own may have a comma for the point
  text << std::setprecision(17) << x;
  return constant(Type::real, text.str());
}

Expression::Parts Expression::take_apart(at::ScalarType dtype) const {
  TORCH_CHECK_TYPE(type() == Type::real, "a score function gives ", kTypes[int(type())],
                   ", but a real number is expected");
  Program program;
  program.add(*this);
  return {program.text(), joined(program.reals(), dtype == at::kDouble ? at::kDouble : at::kFloat),
          joined(program.integers(), at::kInt)};
}

Expression score() { return make(Type::real, "score"); }
Expression batch() { return make(Type::integer, "batch"); }
Expression head() { return make(Type::integer, "head"); }
Expression query() { return make(Type::integer, "query"); }
Expression key() { return make(Type::integer, "key"); }

Expression Table::at(const std::vector<Expression>& index) const {
  TORCH_CHECK_INDEX(int64_t(index.size()) == tensor_.dim(), "a table has the shape ",
                    tensor_.sizes(), ", but ", index.size(), " indices are given");
  for (const Expression& x : index)
    TORCH_CHECK_TYPE(x.type() == Type::integer, "an index of a table is ", kTypes[int(x.type())],
                     ", but an integer is expected");
  const at::ScalarType dtype = tensor_.scalar_type();
  TORCH_CHECK_TYPE(at::isFloatingType(dtype) || dtype == at::kInt || dtype == at::kLong,
                   "a table is ", dtype, ", but a floating dtype, int32 or int64 is expected");
  return make(at::isFloatingType(dtype) ? Type::real : Type::integer, "load", index, tensor_);
}

Expression operation(const char* name, std::vector<Expression> operands) {
  using program::Takes;
  const std::string_view is(name);
  const bool chooses = is == "where", converts = is == "to_float" || is == "to_int";
  const size_t first = chooses ? 1 : 0;
  const program::Operation* const known = program::operation_named(name);
  TORCH_CHECK_VALUE(known || chooses || converts, "there is no operation '", name, "'");
  const size_t takes_so_many = known ? size_t(known->operands) : chooses ? 3 : 1;
  TORCH_CHECK_VALUE(operands.size() == takes_so_many, name, " takes ", takes_so_many,
                    " operands, not ", operands.size());
  Takes takes = known ? known->takes : Takes::all;
  bool any_real = takes == Takes::reals;
  if (any_real) takes = Takes::numbers;  // of which integers become reals
  for (size_t n = first; n < operands.size(); ++n) {
    TORCH_CHECK_TYPE(is_taken(takes, program::Type(operands[n].type())), name, ": an operand is ",
                     kTypes[int(operands[n].type())], ", which it does not take");
    any_real |= operands[n].type() == Type::real;
  }
  TORCH_CHECK_TYPE(!chooses || operands[0].type() == Type::boolean, "where: the first operand is ",
                   kTypes[int(operands[0].type())], ", but a boolean is expected");
  if (is == "to_float") return as_real(operands[0]);
  if (is == "to_int")
    return operands[0].type() == Type::integer ? operands[0]
                                               : make(Type::integer, name, std::move(operands));
  for (size_t n = first; any_real && n < operands.size(); ++n) operands[n] = as_real(operands[n]);
  for (size_t n = first; n < operands.size(); ++n)
    TORCH_CHECK_TYPE(operands[n].type() == operands[first].type(), name, ": operands are ",
                     kTypes[int(operands[first].type())], " and ", kTypes[int(operands[n].type())]);
  const Type type = known && known->compares() ? Type::boolean : operands[first].type();
  return make(type, name, std::move(operands));
}

}  // namespace qkv::scores
