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
  if (call.is_packed()) {
    qkv::attention_forward(documents_of(call, sizes), kernel.problem, result, results);
  } else if (has_queries(kernel.problem)) {
    qkv::attention_forward(kernel.problem, result);
  }
  return results;
}

namespace {

void backward_documents(const Call& call, const Sizes<int64_t>& sizes, const Problem& problem,
                        const BackwardArgs& args, const GradientTensors& gradients) {
  if (sizes.heads == 0) return gradients.zero();
  const Documents documents = documents_of(call, sizes);
  std::vector<BackwardJob> jobs;
  std::vector<BackwardDirection> directions;  // jobs have their addresses
  jobs.reserve(documents.all.size());
  directions.reserve(documents.all.size());
  for (size_t i = 0; i < documents.all.size(); ++i) {
    const Document& document = documents.all[i];
    if (document.seqlen_q == 0) continue;
    BackwardArgs& own = jobs.emplace_back(cut(problem, args, document, int64_t(i))).args;
    if (args.direction)
      own.direction = &directions.emplace_back(cut(problem, *args.direction, document, int64_t(i)));
  }
  gradients.zero_gaps(documents);
  attention_backward(jobs);
}

}  // namespace

void ops::run_backward(const Call& call, const Sizes<int64_t>& sizes, const Problem& problem,
                       const BackwardArgs& args, const GradientTensors& gradients) {
  if (call.is_packed()) {
    backward_documents(call, sizes, problem, args, gradients);
  } else if (has_queries(problem)) {
    qkv::attention_backward(problem, args);
  } else {
    gradients.zero();
  }
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
  ops::run_backward(call, sizes, kernel.problem, args, gradients);
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
