// Dispatch key CPU: the kernel library's forward and backward.
#include "ops/attention/attention.h"
#include "ops/attention/backward.h"
#include "tensors/copies.h"
#include "tensors/documents.h"
#include "tensors/gradients.h"
#include "tensors/layout.h"

namespace qkv {

Tensors ops::attention_forward_cpu(const Call& call) {
  const auto sizes = check<int64_t>(call);
  if (!is_aligned(call)) return attention_forward_cpu(*CopiedCall(call, aligned));
  Tensors results = empty_results(call, sizes);
  KernelCall kernel(call, sizes);
  ForwardResult result;
  kernel.bind(result.output, results[0], Dims::head_row_column);
  if (results[1].defined()) kernel.bind(result.lse, results[1], Dims::head_row);
  kernel.set_strides();
  run_on_rows(call, sizes, kernel.problem, results,
              [&](const Problem& p) { qkv::attention_forward(p, result); });
  return results;
}

void ops::run_backward(Problem& problem, const BackwardArgs& args,
                       const GradientTensors& gradients) {
  if (!has_queries(problem)) return gradients.zero();
  gradients.zero_gaps();
  problem.spans = gradients.spans();
  qkv::attention_backward(problem, args);
}

namespace {

void backward_into(const GradientTensors& gradients, const Sizes<int64_t>& sizes,
                   const Call& call) {
  KernelCall kernel(call, sizes);
  BackwardArgs args;
  kernel.bind(args.output, call[arg::output], Dims::head_row_column);
  kernel.bind(args.lse, call[arg::logsumexp], Dims::head_row);
  if (call.has(arg::grad_output))
    kernel.bind(args.grad_output, call[arg::grad_output], Dims::head_row_column);
  if (call.has(arg::grad_logsumexp))
    kernel.bind(args.grad_lse, call[arg::grad_logsumexp], Dims::head_row);
  gradients.bind(kernel, args);
  kernel.set_strides();
  ops::run_backward(kernel.problem, args, gradients);
}

// With all tensors in float32. What the forward pass returned is rounded, so it runs once more.
void backward_wide(const GradientTensors& gradients, const Sizes<int64_t>& sizes,
                   const Call& call) {
  CopiedCall wide(call, widened);
  wide.recompute(ops::attention_forward);
  backward_into(gradients, sizes, *wide);
}

}  // namespace

Tensors ops::attention_backward_cpu(const Call& call) {
  const auto sizes = check<int64_t>(call);
  if (!call.has(arg::grad_output) && !call.has(arg::grad_logsumexp)) return no_results(call);
  if (!is_aligned(call)) return attention_backward_cpu(*CopiedCall(call, aligned));
  const GradientTensors gradients(call, sizes);
  (gradients.are_wide() ? backward_wide : backward_into)(gradients, sizes, call);
  return gradients.results();
}

}  // namespace qkv
