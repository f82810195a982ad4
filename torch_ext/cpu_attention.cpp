// Dispatch key CPU: the kernel library's forward and backward.
#include <torch/library.h>

#include "copies.h"
#include "cpu.h"
#include "documents.h"
#include "gradients.h"
#include "layout.h"
#include "ops.h"

namespace qkv {

OutputAndLse cpu::attention_forward(const Forward& call, bool wants_lse) {
  const auto sizes = check<int64_t>(call);
  if (!is_aligned(call)) return attention_forward(*CopiedForward(call, aligned), wants_lse);
  OutputAndLse results = empty_results(call, sizes, wants_lse || call.is_packed());
  KernelCall kernel(call, sizes);
  ForwardResult result;
  kernel.bind(result.output, std::get<0>(results), Dims::head_row_column);
  if (const at::Tensor& lse = std::get<1>(results); lse.defined())
    kernel.bind(result.lse, lse, Dims::head_row);
  kernel.set_strides();
  if (call.is_packed()) {
    qkv::attention_forward(documents_of(call, sizes), kernel.problem, result, results);
  } else if (has_queries(kernel.problem)) {
    qkv::attention_forward(kernel.problem, result);
  }
  return results;
}

namespace {

void backward_documents(const Forward& call, const Sizes<int64_t>& sizes, const Problem& problem,
                        const BackwardArgs& args, const GradientTensors& gradients) {
  if (sizes.heads == 0) return gradients.zero();
  const Documents documents = documents_of(call, sizes);
  std::vector<BackwardJob> jobs;
  jobs.reserve(documents.all.size());
  for (size_t i = 0; i < documents.all.size(); ++i)
    if (documents.all[i].seqlen_q > 0)
      jobs.push_back(cut(problem, args, documents.all[i], int64_t(i)));
  gradients.zero_gaps(documents);
  attention_backward(jobs);
}

void backward_into(const GradientTensors& gradients, const Sizes<int64_t>& sizes,
                   const Backward& call) {
  KernelCall kernel(call.forward, sizes);
  BackwardArgs args;
  kernel.bind(args.output, call.output, Dims::head_row_column);
  kernel.bind(args.lse, call.lse, Dims::head_row);
  if (call.grad_output.defined())
    kernel.bind(args.grad_output, call.grad_output, Dims::head_row_column);
  if (call.grad_lse.defined()) kernel.bind(args.grad_lse, call.grad_lse, Dims::head_row);
  gradients.bind(kernel, args);
  kernel.set_strides();
  if (call.forward.is_packed()) {
    backward_documents(call.forward, sizes, kernel.problem, args, gradients);
  } else if (has_queries(kernel.problem)) {
    attention_backward(kernel.problem, args);
  } else {
    gradients.zero();
  }
}

}  // namespace

Gradients cpu::attention_backward(const Backward& call) {
  const Forward& f = call.forward;
  const auto sizes = check<int64_t>(call);
  if (!call.grad_output.defined() && !call.grad_lse.defined()) return {};
  if (!is_aligned(f) || !is_aligned(call.grad_output) || !is_aligned(call.grad_lse) ||
      !is_aligned(call.output) || !is_aligned(call.lse)) {
    return attention_backward({aligned(call.grad_output), aligned(call.grad_lse),
                               *CopiedForward(f, aligned), aligned(call.output), aligned(call.lse),
                               call.output_mask});
  }
  const GradientTensors gradients(f, sizes, call.output_mask);
  if (gradients.are_wide()) {
    const CopiedForward wide(f, widened);
    const auto [output, lse] =
        attention_forward(*wide, /*wants_lse=*/true);  // call.output is rounded
    backward_into(gradients, sizes,
                  {widened(call.grad_output), call.grad_lse, *wide, output, lse, call.output_mask});
  } else {
    backward_into(gradients, sizes, call);
  }
  return gradients.reduced();
}

namespace {

OutputAndLse forward_cpu(const Forward& call) { return cpu::attention_forward(call, true); }

}  // namespace

TORCH_LIBRARY_IMPL(qkv, CPU, m) {
  using ops::Adapter;
  m.impl("attention_forward", Adapter<&ops::forward_args, &forward_cpu>::call);
  m.impl("attention_backward", Adapter<&ops::backward_args, &cpu::attention_backward>::call);
}

}  // namespace qkv
