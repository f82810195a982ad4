// Dispatch key CPU: the kernel library's forward pass, alone and with tangents, and backward pass.
#include "ops/attention/attention.h"
#include "tensors/compute.h"

namespace qkv {

Tensors ops::attention_forward_cpu(const Call& call) {
  ForwardResult result;
  return compute(call, {&result.output, &result.lse}, /*tangents=*/nullptr,
                 [&](const Problem& p) { qkv::attention_forward(p, result); });
}

Tensors ops::attention_jvp_cpu(const Call& call) {
  JvpArgs args;
  JvpResult result;
  return compute(call, {&result.output, &result.lse, &result.output_jvp, &result.lse_jvp}, &args,
                 [&](const Problem& p) { qkv::attention_jvp(p, args, result); });
}

void ops::run_backward(KernelCall& kernel, BackwardArgs& args, const GradientTensors& gradients) {
  kernel.bind(args.output, arg::output);
  kernel.bind(args.lse, arg::logsumexp);
  kernel.bind(args.grad_output, arg::grad_output);
  kernel.bind(args.grad_lse, arg::grad_logsumexp);
  gradients.bind(kernel, args);
  kernel.set_strides();
  if (!has_queries(kernel.problem)) return gradients.zero();
  gradients.zero_gaps();
  kernel.problem.spans = gradients.spans();
  qkv::attention_backward(kernel.problem, args);
}

Tensors ops::attention_backward_cpu(const Call& call) {
  const auto sizes = check<int64_t>(call);
  if (!call.has_incoming()) return no_results(call);
  if (!is_aligned(call)) return attention_backward_cpu(*CopiedCall(call, aligned));
  const GradientTensors gradients(call, sizes);
  gradients.run_wide(&attention_forward, [&](const Call& wide) {
    KernelCall kernel(wide, sizes);
    BackwardArgs args;
    run_backward(kernel, args, gradients);
  });
  return gradients.results();
}

}  // namespace qkv
