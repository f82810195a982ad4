// The gradients of one call: what the kernels write, and from that what the operator returns.
#pragma once

#include "tensors/copies.h"
#include "tensors/documents.h"
#include "tensors/problem.h"

namespace qkv {

// A gradient as the kernel writes it, for every head and batch item of the call; reduced to its
// argument's own shape where that is broadcast.
class GradientTensors {
 public:
  // Allocates what `call`, of a backward operator, wants. `call` and `sizes` must outlive this.
  GradientTensors(const Call& call, const Sizes<int64_t>& sizes);

  // Whether the kernel must be given all tensors in float32, although the call's are not: second
  // derivatives are differences of what earlier passes return, rounded.
  bool needs_wide_call() const { return wide_call_; }
  void bind(KernelCall& kernel, BackwardArgs& args) const;
  void zero() const;
  // Zeroes what packed documents leave out.
  void zero_gaps() const;
  const Span* spans() const { return documents_.all.empty() ? nullptr : documents_.all.data(); }
  // Of the operator; those of gradients and tangents are left undefined.
  Tensors results() const;

 private:
  // How the gradient of a mask is summed: see GradMask.
  enum class MaskSum { none, keys, queries };

  void allocate(Argument argument, c10::IntArrayRef shape, at::ScalarType dtype);
  void allocate_mask(Argument argument);
  void bind_mask(Argument argument, KernelCall& kernel, GradMask& grad) const;
  at::Tensor sum_of_documents(Argument mask) const;
  at::Tensor reduced(Argument argument) const;

  const Call& call_;
  const Sizes<int64_t>& sizes_;
  const Documents documents_;
  bool wide_call_ = false;
  // Whether the gradients of query, key and value are in the compute type: those of a wide call, or
  // where one is added up here, since a sum of rounded terms would be less accurate than torch's.
  bool grads_are_wide_ = false;
  Gradients full_;  // undefined: not wanted
  std::array<MaskSum, arg::kDifferentiable> sums_{};
};

}  // namespace qkv
