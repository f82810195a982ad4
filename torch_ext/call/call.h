// The arguments of one call of an operator, for its length.
#pragma once

#include <ATen/core/Tensor.h>

#include <bitset>

#include "call/operator.h"

namespace qkv {

inline const at::Tensor kNone;

inline const at::Tensor& tensor_of(const std::optional<at::Tensor>& tensor) {
  return tensor ? *tensor : kNone;
}

// A set of differentiable arguments: those whose gradients are wanted.
using ArgumentSet = std::bitset<arg::count>;

struct Call {
  const Operator* op;
  std::array<const at::Tensor*, arg::count> tensors;  // never null; undefined: None
  Options options;
  ArgumentSet output_mask;  // of a backward operator
  // Whether logsumexp is needed. It always is, but in direct calls (run.h).
  bool wants_lse = true;

  explicit Call(const Operator& op) : op(&op) { tensors.fill(&kNone); }

  const at::Tensor& operator[](Argument argument) const { return *tensors[argument]; }
  bool has(Argument argument) const { return tensors[argument]->defined(); }
  // The tensor is not copied: it must outlive the call.
  void set(Argument argument, const at::Tensor& tensor) { tensors[argument] = &tensor; }

  // The same arguments for another operator, without those that it does not take: a Node would save
  // them, if its backward operator does.
  Call as(const Operator& other) const {
    Call call = *this;
    call.op = &other;
    for (int i = 0; i < arg::count; ++i)
      if (!other.takes(Argument(i))) call.tensors[i] = &kNone;
    return call;
  }

  // Documents one after the other: query [T, H, D], key [Tk, Hkv, D].
  bool is_packed() const { return has(arg::cu_seq_q); }
  // What error messages begin with.
  const char* title() const { return is_packed() ? "varlen_attention" : op->title; }
  template <class ArgumentOrOption>
  const char* name_of(ArgumentOrOption which) const {
    return op->name_of(which);
  }

  // Whether the results depend on an argument differentiably.
  bool differentiates(Argument argument) const {
    return !op->kernels.differentiates || op->kernels.differentiates(*this, argument);
  }
  // Whether a backward operator is given a gradient of what is differentiated. Without any, all
  // that it returns is None.
  bool has_incoming() const {
    for (const Operator* o = op; o->is_backward; o = o->differentiated) {
      bool any = false;
      for (size_t i = 0; i < o->incoming; ++i) any |= has(Argument(o->parameters[i].which));
      if (!any) return false;
    }
    return true;
  }
  // Whether the call has the tangent of a differentiable argument beside it.
  bool has_tangents() const {
    for (int i = 0; i < arg::kDifferentiable; ++i)
      if (has(tangent_of(Argument(i)))) return true;
    return false;
  }
  // Whether a backward operator has this gradient to compute: not of None or a boolean mask.
  bool wants_gradient(Argument argument) const {
    return output_mask[argument] && has(argument) &&
           at::isFloatingType((*this)[argument].scalar_type()) && differentiates(argument);
  }
};

// The gradients of some arguments; undefined: none.
using Gradients = std::array<at::Tensor, arg::count>;

// No gradient at all, for a call whose results had none.
inline Tensors no_results(const Call& call) { return Tensors(call.op->results.size()); }

inline std::tuple<at::Tensor, at::Tensor> pair_of(Tensors&& results) {
  return {std::move(results[0]), std::move(results[1])};
}

}  // namespace qkv
