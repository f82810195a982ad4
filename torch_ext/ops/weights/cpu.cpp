// Dispatch key CPU: attention_weights. The kernels' backward pass goes over the weights anyway:
// it hands them out, or sums them over the queries.
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/strides.h>

#include "ops/weights/weights.h"
#include "tensors/copies.h"
#include "tensors/gradients.h"
#include "tensors/large_memory.h"

namespace qkv {
namespace {

// sum_i weight_ij is the gradient of a value with one column, under a grad_output of ones. There
// is one such value for each query head.
Sizes<int64_t> with_column_of_values(Sizes<int64_t> sizes) {
  sizes.value_heads = sizes.heads;
  sizes.head_dim_v = 1;
  return sizes;
}

at::TensorOptions compute_options(const Call& call) {
  return call[arg::query].options().dtype(compute_type(call[arg::query].scalar_type()));
}

at::Tensor lse_of(const Call& call, const Sizes<int64_t>& sizes) {
  at::Tensor lse = at::empty(sizes.lse(), compute_options(call));
  KernelCall kernel(call, sizes);
  ForwardResult result;
  kernel.bind(result.lse, lse, Dims::head_row);
  kernel.set_strides();
  if (has_queries(kernel.problem)) attention_forward(kernel.problem, result);
  return lse;
}

// What the weights are added to, in the compute type.
at::Tensor zero_weights(const Call& call, c10::IntArrayRef shape) {
  return zeros(shape, c10::contiguous_strides(shape), compute_type(call[arg::query].scalar_type()));
}

// [..., H, L, S], or their mean over heads.
at::Tensor weights_of(const Call& call, const Sizes<int64_t>& sizes, const at::Tensor& lse,
                      Reduce reduce) {
  const bool mean = reduce == Reduce::heads;
  at::Tensor result = zero_weights(call, sizes.weights(reduce));
  const at::Tensor weights = mean ? result.unsqueeze(-3) : result;  // one head for all: added up
  KernelCall kernel(call, sizes);
  BackwardArgs args;
  kernel.bind(args.lse, lse, Dims::head_row);
  kernel.bind(args.weights, weights, Dims::head_row_column);
  kernel.set_strides();
  if (has_queries(kernel.problem)) attention_backward(kernel.problem, args);
  return mean ? result.div_(sizes.heads) : result;
}

// [..., H, S]
at::Tensor sum_over_queries(const Call& call, const Sizes<int64_t>& forward_sizes,
                            const at::Tensor& lse) {
  const auto sizes = with_column_of_values(forward_sizes);
  const at::TensorOptions options = call[arg::query].options();
  at::Tensor sums = at::zeros(sizes.weights(Reduce::queries), options);
  const at::Tensor columns = sums.unsqueeze(-1);
  const at::Tensor zero = at::zeros({1, 1}, options), one = at::ones({1, 1}, options);
  KernelCall kernel(call, sizes);
  BackwardArgs args;
  kernel.bind(args.lse, lse, Dims::head_row);
  kernel.bind(args.grad_value, columns, Dims::head_row_column);
  kernel.bind(kernel.problem.value, zero, Dims::head_row_column);
  kernel.bind(args.output, zero, Dims::head_row_column);
  kernel.bind(args.grad_output, one, Dims::head_row_column);
  kernel.set_strides();
  if (has_queries(kernel.problem)) attention_backward(kernel.problem, args);
  return sums;
}

// The gradient of every weight, [..., H or 1, L or 1, S] in the compute type.
at::Tensor grad_of_each(const Call& call, const Sizes<int64_t>& sizes) {
  const at::Tensor grad = widened(call[arg::grad_weights]);
  if (call.options.reduce == Reduce::queries) return grad.unsqueeze(-2);
  return call.options.reduce == Reduce::heads ? grad.div(sizes.heads).unsqueeze(-3) : grad;
}

void backward_into(const GradientTensors& gradients, const Sizes<int64_t>& sizes, const Call& call,
                   const at::Tensor& grad_weights) {
  const at::Tensor dot = at::empty(sizes.lse(), compute_options(call));
  KernelCall kernel(call, sizes);
  BackwardArgs args;
  Output dot_output;
  kernel.bind(args.lse, call[arg::logsumexp], Dims::head_row);
  kernel.bind(args.grad_weights, grad_weights, Dims::head_row_column);
  kernel.bind(args.grad_weights_dot, dot, Dims::head_row);
  kernel.bind(dot_output, dot, Dims::head_row);
  gradients.bind(kernel, args);
  kernel.set_strides();
  if (has_queries(kernel.problem)) {
    attention_weights_dot(kernel.problem, args, dot_output);
    attention_backward(kernel.problem, args);
  } else {
    gradients.zero();
  }
}

}  // namespace

Tensors ops::weights_forward_cpu(const Call& call) {
  const auto sizes = check<int64_t>(call);
  if (!is_aligned(call)) return weights_forward_cpu(*CopiedCall(call, aligned));
  const Reduce reduce = call.options.reduce;
  at::Tensor lse = lse_of(call, sizes);
  const at::Tensor result = reduce == Reduce::queries ? sum_over_queries(call, sizes, lse)
                                                      : weights_of(call, sizes, lse, reduce);
  return {result.to(call[arg::query].scalar_type()), std::move(lse)};
}

Tensors ops::weights_backward_cpu(const Call& call) {
  const auto sizes = check<int64_t>(call);
  if (!is_aligned(call)) return weights_backward_cpu(*CopiedCall(call, aligned));
  const at::Tensor grad = grad_of_each(call, sizes);
  const GradientTensors gradients(call, sizes);
  if (gradients.are_wide()) {
    backward_into(gradients, sizes, *CopiedCall(call, widened), grad);
  } else {
    backward_into(gradients, sizes, call, grad);
  }
  return gradients.results();
}

}  // namespace qkv
