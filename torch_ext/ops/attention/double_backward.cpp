// The derivatives of attention_backward and of attention_forward_jvp (docs/report.md).
#include <ATen/ATen.h>

#include "attention_jvp.h"
#include "autograd/run.h"
#include "ops/attention/attention.h"
#include "tensors/layout.h"

namespace qkv::ops {
namespace {

// output_tangent and logsumexp_tangent, in that order: pass 1, which has the output.
Tensors first_pass(const Call& call, const Sizes<int64_t>& sizes) {
  Tensors tangents = {empty_result(call, sizes, arg::output_tangent),
                      empty_result(call, sizes, arg::logsumexp_tangent)};
  KernelCall kernel(call, sizes);
  JvpArgs args;
  JvpResult result;
  kernel.bind_tangents(args);
  kernel.bind(args.output, arg::output);
  kernel.bind(result.output_jvp, tangents[0], Shape::output);
  kernel.bind(result.lse_jvp, tangents[1], Shape::row);
  kernel.set_strides();
  run_on_rows(call, sizes, kernel.problem, {at::Tensor(), at::Tensor(), tangents[0], tangents[1]},
              [&](const Problem& p) { qkv::attention_jvp(p, args, result); });
  return tangents;
}

// Pass 2, of a call that has output_tangent and logsumexp_tangent.
void second_pass(const GradientTensors& gradients, const Sizes<int64_t>& sizes, const Call& call) {
  KernelCall kernel(call, sizes);
  BackwardArgs args;
  BackwardDirection direction;
  kernel.bind_tangents(direction.along);
  kernel.bind(direction.output_jvp, arg::output_tangent);
  kernel.bind(direction.lse_jvp, arg::logsumexp_tangent);
  args.direction = &direction;
  run_backward(kernel, args, gradients);
}

bool wants_second_pass(const Call& call) {
  for (int i = 0; i < arg::kDifferentiable; ++i)
    if (call.wants_gradient(Argument(i))) return true;
  return false;
}

// How attention_jvp makes scores anew that the forward pass made in this way.
ScoreWay jvp_way(ScoreWay way) { return way == ScoreWay::fixed ? way : ScoreWay::tiles; }

// Both passes; returns what the first one does.
Tensors both_passes(const GradientTensors& gradients, const Sizes<int64_t>& sizes, Call call) {
  if (gradients.are_wide()) call.options.scores = jvp_way(call.options.scores);
  Tensors tangents = {call[arg::output_tangent], call[arg::logsumexp_tangent]};
  if (!tangents[0].defined() || !tangents[1].defined()) tangents = first_pass(call, sizes);
  call.set(arg::output_tangent, tangents[0]);
  call.set(arg::logsumexp_tangent, tangents[1]);
  if (wants_second_pass(call)) second_pass(gradients, sizes, call);
  return tangents;
}

Argument itself(Argument argument) { return argument; }

// results += others, of which each is the gradient of what `in_results` has for its argument.
void add(const Operator& op, Tensors& results, const Operator& of_others, const Tensors& others,
         Argument (*in_results)(Argument) = itself) {
  for (size_t i = 0; i < results.size(); ++i)
    for (size_t j = 0; j < others.size(); ++j)
      if (op.results[i] == in_results(of_others.results[j]) && others[j].defined())
        results[i] = results[i].defined() ? results[i].add(others[j]) : others[j];
}

// attention_backward with the gradients that the arguments `of_output` and `of_lse` of a call have.
Tensors backward_of(const Call& call, Argument of_output, Argument of_lse) {
  if (!call.has(of_output) && !call.has(of_lse)) return {};
  Call backward = call.as(attention_backward);
  backward.set(arg::grad_output, call[of_output]);
  backward.set(arg::grad_logsumexp, call[of_lse]);
  return run(backward);
}

}  // namespace

Tensors attention_double_backward_cpu(const Call& call) {
  const auto sizes = check<int64_t>(call);
  if (!call.has_incoming()) return no_results(call);
  const GradientTensors gradients(call, sizes);
  const Tensors tangents = gradients.run_wide(&attention_forward_jvp, [&](const Call& wide) {
    return both_passes(gradients, sizes, wide);
  });
  Tensors results = gradients.results();
  for (size_t i = 0; i < results.size(); ++i) {
    const Argument argument = call.op->results[i];
    if (!call.wants_gradient(argument) || argument < arg::kDifferentiable) continue;
    const bool is_output = argument == arg::grad_output;
    // The strides are those that the Meta kernel says, and no result may be an argument.
    results[i] = empty_gradient<int64_t>(call[argument]).copy_(tangents[is_output ? 0 : 1]);
  }
  return results;
}

// What attention_backward returns is linear in the gradients that it is given, so that their
// tangents take their place.
Tensors attention_backward_jvp(const Call& call) {
  Tensors results = run(call.as(attention_backward));  // without tangents
  Tensors tangents = no_results(call);
  Call second = call.as(attention_double_backward);
  if (call.has_tangents()) add(*call.op, tangents, attention_double_backward, run(second));
  add(*call.op, tangents, attention_backward,
      backward_of(call, arg::grad_output_tangent, arg::grad_logsumexp_tangent));
  for (size_t i = 0; i < tangents.size(); ++i)
    results.push_back(tangents[i].defined() || !results[i].defined() ? tangents[i]
                                                                     : at::zeros_like(results[i]));
  return results;
}

// The loss is a function of output and logsumexp, which have grad_output and grad_logsumexp, and of
// their tangents, which have grad_output_tangent and grad_logsumexp_tangent: call these the second
// gradients. The tangents are linear in the directions, whose gradients are those of a backward
// pass with the second gradients; and the gradients of the inputs are those of a double backward
// with them, and of a plain backward with the first ones.
Tensors attention_jvp_backward(const Call& of_jvp) {
  Call call = of_jvp;
  call.options.scores = jvp_way(call.options.scores);
  Tensors results = no_results(call);
  add(*call.op, results, attention_backward,
      backward_of(call, arg::grad_output, arg::grad_logsumexp));
  if (!call.has(arg::grad_output_tangent) && !call.has(arg::grad_logsumexp_tangent)) return results;
  Call second = call.as(attention_double_backward);
  second.set(arg::grad_output, call[arg::grad_output_tangent]);
  second.set(arg::grad_logsumexp, call[arg::grad_logsumexp_tangent]);
  if (call.has_tangents()) add(*call.op, results, attention_double_backward, run(second));
  Call directions = call;
  for (int i = 0; i < arg::kDifferentiable; ++i)
    directions.output_mask.set(Argument(i), call.output_mask[tangent_of(Argument(i))]);
  add(*call.op, results, attention_backward,
      backward_of(directions, arg::grad_output_tangent, arg::grad_logsumexp_tangent), tangent_of);
  return results;
}

}  // namespace qkv::ops
