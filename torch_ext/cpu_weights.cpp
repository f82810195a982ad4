// Dispatch key CPU: attention_weights. The kernels' backward pass goes over the weights anyway:
// it hands them out, or sums them over the queries.
#include <ATen/ops/empty.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include "aligned.h"
#include "gradients.h"
#include "large_memory.h"
#include "ops.h"

namespace qkv {
namespace {

// sum_i weight_ij is the gradient of a value with one column, under a grad_output of ones. There
// is one such value for each query head.
Sizes<int64_t> with_column_of_values(Sizes<int64_t> sizes) {
  sizes.value_heads = sizes.heads;
  sizes.head_dim_v = 1;
  return sizes;
}

// A column of equal numbers, for any number of rows: its strides are 0.
Input column(const Problem& p, double number) {
  static const float f32[] = {0, 1};
  static const double f64[] = {0, 1};
  const int i = number == 1;
  return {p.dtype == DType::f32 ? static_cast<const void*>(f32 + i) : f64 + i, {}};
}

at::Tensor lse_of(const Forward& call, const Sizes<int64_t>& sizes) {
  at::Tensor lse = at::empty(sizes.lse(), call.query().options());
  KernelCall kernel(call, sizes);
  ForwardResult result;
  kernel.bind(result.lse, lse, Dims::head_row);
  kernel.set_strides();
  if (has_queries(kernel.problem)) attention_forward(kernel.problem, result);
  return lse;
}

// [..., H, S], zero at first.
void sum_over_queries(const Forward& call, const Sizes<int64_t>& forward_sizes,
                      const at::Tensor& lse, const at::Tensor& sums) {
  const auto sizes = with_column_of_values(forward_sizes);
  const at::Tensor columns = sums.unsqueeze(-1);
  KernelCall kernel(call, sizes);
  BackwardArgs args;
  kernel.bind(args.lse, lse, Dims::head_row);
  kernel.bind(args.grad_value, columns, Dims::head_row_column);
  kernel.set_strides();
  kernel.problem.value = args.output = column(kernel.problem, 0);
  args.grad_output = column(kernel.problem, 1);
  if (has_queries(kernel.problem)) attention_backward(kernel.problem, args);
}

OutputAndLse weights_cpu(const Weights& call) {
  const Forward& f = call.forward;
  const auto sizes = check<int64_t>(f);
  if (!is_aligned(f)) return weights_cpu({*AlignedForward(f), call.reduce});
  at::Tensor lse = lse_of(f, sizes);
  const auto shape = sizes.weights(call.reduce);
  at::Tensor result = zeros(shape, c10::contiguous_strides(shape), f.query().scalar_type());
  if (call.reduce == Reduce::queries) {
    sum_over_queries(f, sizes, lse, result);
    return {std::move(result), std::move(lse)};
  }
  const bool mean = call.reduce == Reduce::heads;
  const at::Tensor weights = mean ? result.unsqueeze(-3) : result;  // one head for all: added up
  KernelCall kernel(f, sizes);
  BackwardArgs args;
  kernel.bind(args.lse, lse, Dims::head_row);
  kernel.bind(args.weights, weights, Dims::head_row_column);
  kernel.set_strides();
  if (has_queries(kernel.problem)) attention_backward(kernel.problem, args);
  if (mean) result.div_(sizes.heads);
  return {std::move(result), std::move(lse)};
}

Gradients weights_backward(const WeightsBackward& call, const Sizes<int64_t>& sizes) {
  const Forward& f = call.weights.forward;
  const bool mean = call.weights.reduce == Reduce::heads;
  const at::Tensor grad =
      mean ? call.grad_weights.div(sizes.heads).unsqueeze(-3) : call.grad_weights;
  const at::Tensor dot = at::empty(sizes.lse(), f.query().options());
  const GradientTensors gradients(f, sizes, call.output_mask);
  KernelCall kernel(f, sizes);
  BackwardArgs args;
  Output dot_output;
  kernel.bind(args.lse, call.lse, Dims::head_row);
  kernel.bind(args.grad_weights, grad, Dims::head_row_column);
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
  return gradients.reduced();
}

// With the incoming gradient as the value, and a grad_output of ones.
Gradients queries_backward(const WeightsBackward& call, const Sizes<int64_t>& forward_sizes) {
  const Forward& f = call.weights.forward;
  const auto sizes = with_column_of_values(forward_sizes);
  const at::Tensor value = call.grad_weights.unsqueeze(-1);
  const at::Tensor output = at::empty(sizes.output(), f.query().options());
  const GradientTensors gradients(f, sizes, call.output_mask);
  KernelCall kernel(f, sizes);
  ForwardResult result;
  BackwardArgs args;
  kernel.bind(kernel.problem.value, value, Dims::head_row_column);
  kernel.bind(result.output, output, Dims::head_row_column);
  kernel.bind(args.output, output, Dims::head_row_column);
  kernel.bind(args.lse, call.lse, Dims::head_row);
  gradients.bind(kernel, args);
  kernel.set_strides();
  args.grad_output = column(kernel.problem, 1);
  if (has_queries(kernel.problem)) {
    attention_forward(kernel.problem, result);
    attention_backward(kernel.problem, args);
  } else {
    gradients.zero();
  }
  return gradients.reduced();
}

Gradients weights_backward_cpu(const WeightsBackward& call) {
  const auto sizes = check<int64_t>(call);
  const Forward& f = call.weights.forward;
  if (!is_aligned(f) || !is_aligned(call.grad_weights) || !is_aligned(call.lse)) {
    return weights_backward_cpu({aligned(call.grad_weights),
                                 {*AlignedForward(f), call.weights.reduce},
                                 aligned(call.lse),
                                 call.output_mask});
  }
  return call.weights.reduce == Reduce::queries ? queries_backward(call, sizes)
                                                : weights_backward(call, sizes);
}

}  // namespace

TORCH_LIBRARY_IMPL(qkv, CPU, m) {
  using ops::Adapter;
  m.impl("weights_forward", Adapter<&ops::weights_args, &weights_cpu>::call);
  m.impl("weights_backward", Adapter<&ops::weights_backward_args, &weights_backward_cpu>::call);
}

}  // namespace qkv
