// qkv::attention, qkv::attention_with_lse, qkv::attention_weights, qkv::attention_with_weights and
// the operators they are made of.
#pragma once

#include "autograd/define.h"
#include "tensors/gradients.h"

namespace qkv::ops {

extern DefinedOperator attention_forward, attention_backward, attention_double_backward;
extern DefinedOperator attention_forward_jvp;
// The second has what the first has, and the output beside the weights, from one pass.
extern DefinedOperator weights_forward, with_weights_forward;

// Their CPU kernels that others call, too.
Tensors attention_forward_cpu(const Call& call);
Tensors attention_backward_cpu(const Call& call);
// The gradient of <tangents, what attention_backward returns> (docs/report.md). output_tangent
// and logsumexp_tangent are what attention_forward_jvp returns for the same tangents; they are
// computed where they are not given.
Tensors attention_double_backward_cpu(const Call& call);

// attention_backward in forward mode (OperatorKernels::jvp).
Tensors attention_backward_jvp(const Call& call);
// The gradient of what attention_forward_jvp returns, by the other operators.
Tensors attention_jvp_backward(const Call& call);

// The kernel library's backward pass, of first derivatives or, with args.direction, of second ones:
// binds what both have in common, then runs it. The gradients become 0 where there is nothing to
// attend to.
void run_backward(KernelCall& kernel, BackwardArgs& args, const GradientTensors& gradients);

// qkv::dropout_seed, from which dropout's random numbers follow: int64 [1], drawn anew.
at::Tensor dropout_seed(const at::Tensor& query);

// Under autocast, with a seed if there is dropout: what the users' operators do, by the operator
// that computes it. For CPU and meta tensors.
Tensors attend(Call call, const Operator& op = attention_forward);

// What attention_forward returns, and the operators with the weights, out of torch's operators:
// what gives the derivatives of orders for which there are no kernels (autograd/compose.h). It
// needs the memory of a few [..., H, L, S] tensors.
Tensors attention_composition(const Call& call);

// scores [..., H, L, S] after the call's score program, if it has one, out of torch's operators.
at::Tensor apply_score_program(const Call& call, const at::Tensor& scores);

// Throws c10::Error for a call without a query, at which composite operators look first; the
// operators that they call check the rest.
void check_query(const Call& call);

}  // namespace qkv::ops
