// Score functions of your own in C++, built by expressions:
//
//   using namespace qkv::scores;
//   Table slope(torch::ones({heads}).requires_grad_());
//   const Expression function = score() - slope[head()] * abs(query() - key());
//   auto output = qkv::attention(q, k, v, function.in(qkv::AttentionOptions()));
//
// docs/kernels.md has what each operation does.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "qkv/export.h"

namespace qkv::scores {

enum class Type { real, integer, boolean };
struct Node;  // an operation with its operands

// A number that belongs to a score: it is worked out for each one. Numbers of C++ become constants,
// and integers beside reals become reals.
class QKV_API Expression {
 public:
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  Expression(T x) {
    if constexpr (std::is_same_v<T, bool>)
      *this = constant(Type::boolean, x ? "1" : "0");
    else if constexpr (std::is_integral_v<T>)
      *this = constant(Type::integer, std::to_string(x));
    else
      *this = of_double(x);
  }
  explicit Expression(std::shared_ptr<const Node> node) : node_(std::move(node)) {}

  const std::shared_ptr<const Node>& node() const { return node_; }
  Type type() const;

  // The options with this function: score_program, score_tables and score_indices. `dtype` is that
  // of query. Throws c10::TypeError unless this is real.
  template <class Options>
  Options in(Options options, at::ScalarType dtype = at::kFloat) const {
    const Parts parts = take_apart(dtype);
    options.score_program(parts.program);
    if (parts.tables.defined()) options.score_tables(parts.tables);
    if (parts.indices.defined()) options.score_indices(parts.indices);
    return options;
  }

 private:
  struct Parts {
    std::string program;
    at::Tensor tables, indices;
  };
  static Expression constant(Type type, const std::string& text);
  static Expression of_double(double x);
  Parts take_apart(at::ScalarType dtype) const;

  std::shared_ptr<const Node> node_;
};

// What a function is given of a pair.
QKV_API Expression score();
QKV_API Expression batch();
QKV_API Expression head();
QKV_API Expression query();
QKV_API Expression key();

// A tensor that a function reads: floating, which has a gradient, or of int32 or int64. An index
// below 0 counts from the end; an element outside is NaN, or makes the score NaN.
class QKV_API Table {
 public:
  explicit Table(at::Tensor tensor) : tensor_(std::move(tensor)) {}

  // One index for each dimension. Throws c10::IndexError for another number of them.
  template <class... Index>
  Expression operator()(const Index&... index) const {
    return at({Expression(index)...});
  }
  Expression operator[](const Expression& index) const { return at({index}); }

 private:
  Expression at(const std::vector<Expression>& index) const;
  at::Tensor tensor_;
};

// The operation of this name, of docs/kernels.md. Throws c10::TypeError for operands of
// types that it does not take, c10::ValueError for another number of them.
QKV_API Expression operation(const char* name, std::vector<Expression> operands);

#define QKV_ONE(function, name) \
  inline Expression function(const Expression& x) { return operation(name, {x}); }
#define QKV_TWO(function, name)                                          \
  inline Expression function(const Expression& x, const Expression& y) { \
    return operation(name, {x, y});                                      \
  }
QKV_ONE(operator-, "neg")
QKV_ONE(operator!, "not")
QKV_ONE(operator~, "not")
QKV_ONE(abs, "abs")
QKV_ONE(exp, "exp")
QKV_ONE(log, "log")
QKV_ONE(tanh, "tanh")
QKV_ONE(sigmoid, "sigmoid")
QKV_ONE(sqrt, "sqrt")
QKV_ONE(rsqrt, "rsqrt")
QKV_ONE(floor, "floor")
QKV_ONE(sin, "sin")
QKV_ONE(cos, "cos")
QKV_ONE(to_float, "to_float")
QKV_ONE(to_int, "to_int")
QKV_TWO(operator+, "add")
QKV_TWO(operator-, "sub")
QKV_TWO(operator*, "mul")
QKV_TWO(operator/, "div")  // of reals, also where both are integers
QKV_TWO(floordiv, "floordiv")
QKV_TWO(rem, "rem")
QKV_TWO(min, "min")
QKV_TWO(max, "max")
QKV_TWO(operator==, "eq")
QKV_TWO(operator!=, "ne")
QKV_TWO(operator<, "lt")
QKV_TWO(operator<=, "le")
QKV_TWO(operator>, "gt")
QKV_TWO(operator>=, "ge")
QKV_TWO(operator&, "and")
QKV_TWO(operator|, "or")
QKV_TWO(operator^, "xor")
QKV_TWO(operator<<, "shl")
QKV_TWO(operator>>, "shr")
#undef QKV_TWO
#undef QKV_ONE
// x where `which` is true, else y.
inline Expression where(const Expression& which, const Expression& x, const Expression& y) {
  return operation("where", {which, x, y});
}

}  // namespace qkv::scores
