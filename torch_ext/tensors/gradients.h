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

  // The gradients of query, key and value are float32, and the kernel must be given all tensors in
  // it, although the call's are not: one of them is added up here, and a sum of rounded terms would
  // be less accurate than torch's; or they are second derivatives, which are differences of what
  // earlier passes return, rounded.
  bool are_wide() const { return wide_; }
  // run(call), or, if the gradients are wide, run of the call in float32. What the forward pass
  // returned is rounded, so `again`, unless it is null, is run once more to make it in float32.
  template <class Run>
  auto run_wide(const Operator* again, const Run& run) const {
    if (!wide_) return run(call_);
    CopiedCall wide(call_, widened);
    if (again) wide.recompute(*again);
    return run(*wide);
  }
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
  bool wide_ = false;
  Gradients full_;  // undefined: not wanted
  std::array<MaskSum, arg::kDifferentiable> sums_{};
};

}  // namespace qkv
