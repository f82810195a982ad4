// An operator: its signature, from which everything follows that does not depend on what it
// computes, and the functions that compute it. What torch is told of it: autograd/define.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <string>
#include <vector>

#include "call/arguments.h"
#include "call/options.h"

namespace qkv {

struct Call;
using Tensors = c10::SmallVector<at::Tensor, 8>;  // the results of an operator; undefined: None
using Body = Tensors (*)(const Call&);

// One argument as an operator takes it.
struct Parameter {
  std::string name;  // what the operator calls it
  int8_t which;      // an Argument or an Option
  bool is_tensor;
  bool is_required = false;  // a tensor that must not be None
  bool has_default = false;
};

// The functions of an operator; those that it does not have are null.
struct OperatorKernels {
  // Dispatch keys CPU and Meta; or CompositeImplicitAutograd, in terms of other operators. Without
  // `meta`, the Meta kernel checks the call and allocates the results (tensors/layout.h).
  Body cpu = nullptr, meta = nullptr, composite = nullptr;
  // Dispatch key AutocastCPU, where something is cast. A composite operator's own function does it.
  Body autocast = nullptr;
  // Whether the results of a call depend differentiably on an argument. Null: on all of them.
  bool (*differentiates)(const Call&, Argument) = nullptr;
  // Of a forward operator: the same results out of torch's operators, which have derivatives of
  // every order and in forward mode. From it follows what differentiates a call, of this operator
  // or of one of its derivatives, without `backward` or without `jvp` (autograd/compose.h). Null:
  // that is an error, as it is for packed documents and for parts of a larger call.
  Body composition = nullptr;
  // Forward mode: the results, and then their tangents, of a call that has the tangents of its
  // arguments beside them (tangent_of); undefined where a result has none. Null: it is the
  // composition's, or an error.
  Body jvp = nullptr;
  // Whether the backward operator reads the numbers of an argument in a call; where it does not, a
  // Node keeps no more than its shape, in zeros without memory. Null: it reads all of them.
  bool (*reads)(const Call&, Argument) = nullptr;
  // Of an operator that has no gradients, for inference: what to do instead of asking for them.
  const char* no_gradient = nullptr;
};

// Signatures are schemas without types and defaults, which are those of arguments.h:
//
//   attention(query, key, value, attn_mask?=, dropout_p=, *, scale=) -> output
//
// `name?` may be None, `name=` has its default, `name as argument` calls an argument by another
// name, `name(a!)` is written to. The results are tensors of arguments.h, too.
class Operator {
 public:
  // title: what error messages begin with.
  Operator(const char* title, const std::string& signature, const OperatorKernels& kernels);

  // The operator of the gradients of `forward`:
  //
  //   attention_backward(grad_output?, grad_logsumexp?; output, logsumexp)
  //
  // It takes the named gradients of the results, then the tensors that `forward` takes, then what
  // is named after the semicolon, results of it, and its options with their defaults, if any. It
  // returns a gradient for every differentiable argument of `forward`; None for those that are not
  // floating, or that output_mask does not ask for. If `forward` is a backward operator itself, the
  // gradients of what it returns are called tangents: of the arguments whose gradients those are.
  Operator(Operator& forward, const std::string& signature, const OperatorKernels& kernels);
  Operator(const Operator&) = delete;

  const char* const title;
  const OperatorKernels kernels;
  std::string name, schema;
  std::vector<Parameter> parameters;     // without output_mask, the last one of a backward operator
  std::vector<Argument> differentiable;  // those of its tensors that may have gradients
  std::vector<Argument> results;  // what they are; of a backward operator: whose gradients they are
  bool is_backward = false;
  const Operator* differentiated = nullptr;  // of a backward operator: `forward`
  size_t incoming = 0;  // of its parameters, how many are gradients of what `forward` returns
  int order = 0;        // of its derivative: 1 for the backward operator of a forward operator
  bool writes = false;  // to one of its arguments
  // Null: there is none, and a gradient is the composition's, or an error.
  const Operator* backward = nullptr;

  // The gradient of a result, as backward operators take it; `count`: it has none.
  Argument incoming_of(Argument result) const {
    return is_backward ? tangent_of(result) : gradient_of(result);
  }
  bool takes(Argument argument) const { return tensors_ >> argument & 1; }
  bool takes(Option option) const { return options_ >> option & 1; }
  // Calls visit with each tensor that it takes, and not with the many that it has not.
  template <class Visit>
  void for_each_tensor(const Visit& visit) const {
    for (uint64_t left = tensors_; left != 0; left &= left - 1)
      visit(Argument(__builtin_ctzll(left)));
  }
  const char* name_of(Argument argument) const;
  const char* name_of(Option option) const;
  const c10::OperatorHandle& handle() const { return *handle_; }

 protected:
  std::optional<c10::OperatorHandle> handle_;

 private:
  void parse(const std::string& signature);
  const char* name_of(int which, bool is_tensor) const;

  uint64_t tensors_ = 0, options_ = 0;  // a bit for each that it takes
  static_assert(arg::count <= 64 && opt::count <= 64);
};

}  // namespace qkv
