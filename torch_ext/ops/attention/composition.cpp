#include "ops/attention/composition.h"

#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/SymInt.h>

#include "ops/attention/attention.h"
#include "ops/attention/steps.h"

namespace qkv::ops {
namespace {

at::Tensor reduced_weights(const at::Tensor& weights, Reduce reduce) {
  if (reduce == Reduce::queries) return weights.sum(-2);
  return reduce == Reduce::heads && weights.dim() > 2 ? weights.mean(-3) : weights;
}

at::Tensor sum_of_rows(const at::Tensor& of_rows) { return of_rows.sum(-1).sum(-1); }

// The results of a backward operator: gradient(argument) of each that is wanted, reduced to the
// argument's shape.
template <class Gradient>
Tensors gradients_of(const Call& call, const Gradient& gradient) {
  Tensors results;
  for (const Argument argument : call.op->results)
    results.push_back(call.wants_gradient(argument) ? reduced(call, argument, gradient(argument))
                                                    : at::Tensor());
  return results;
}

}  // namespace

bool composes_attention(const Call& call) {
  return !call.is_packed() && call.options.shard.is_whole();
}

Tensors attention_forward_composition(const Call& call) {
  const Steps steps = steps_of(call);
  const at::Tensor weights = after_dropout(steps.weights, steps);
  const at::ScalarType type = call[arg::query].scalar_type();
  Tensors results;
  for (const Argument result : call.op->results) {
    if (result == arg::output) {
      results.push_back(at::matmul(weights, steps.value).to(type));
    } else if (result == arg::weights) {
      results.push_back(reduced_weights(weights, call.options.reduce).to(type));
    } else {
      results.push_back(steps.lse.squeeze(-1));
    }
  }
  return results;
}

Tensors attention_jvp_composition(const Call& call) {
  const Steps steps = steps_of(call);
  const Changes changes = changes_of(call, steps);
  Tensors results = attention_forward_composition(call.as(attention_forward));
  results.push_back(output_tangent(call, steps, changes).to(call[arg::query].scalar_type()));
  results.push_back(changes.lse.squeeze(-1));
  return results;
}

Tensors attention_backward_composition(const Call& call) {
  const Steps steps = steps_of(call);
  const FirstDerivative first = first_derivative(call, steps);
  const at::Tensor grad = steps.weights.mul(first.difference);
  const at::Tensor of_dots = before_options(grad, steps);
  return gradients_of(call, [&](Argument argument) -> at::Tensor {
    switch (argument) {
      case arg::query:
        return at::matmul(of_dots, steps.key).mul(steps.scale);
      case arg::key:
        return at::matmul(of_dots.transpose(-2, -1), steps.query).mul(steps.scale);
      case arg::value:
        if (!call.has(arg::grad_output)) return at::zeros_like(steps.value);
        return at::matmul(after_dropout(steps.weights, steps).transpose(-2, -1),
                          call[arg::grad_output].to(grad.scalar_type()));
      case arg::sinks:
        return sum_of_rows(steps.sink_weights.mul(first.delta)).neg();
      default:
        return gradient_of_option(argument, grad, steps);
    }
  });
}

// docs/derivatives.md, pass 2, whose letters are in the comments.
Tensors attention_double_backward_composition(const Call& call) {
  const Steps steps = steps_of(call);
  const Changes changes = changes_of(call, steps);
  const FirstDerivative first = first_derivative(call, steps);
  const at::ScalarType type = steps.weights.scalar_type();
  const at::Tensor grad_output =
      call.has(arg::grad_output) ? call[arg::grad_output].to(type) : at::Tensor();
  at::Tensor of_weights = at::zeros_like(steps.weights);  // gdot
  if (grad_output.defined() && call.has(arg::value_tangent))
    of_weights = after_dropout(
        at::matmul(grad_output,
                   for_each_head(call, call[arg::value_tangent], type).transpose(-2, -1)),
        steps);
  const at::Tensor delta = changes.weights.mul(first.of_weights)
                               .add(steps.weights.mul(of_weights))
                               .sum(-1, /*keepdim=*/true);      // Edot
  const at::Tensor grad = steps.weights.mul(first.difference);  // W
  const at::Tensor change =                                     // Wdot
      changes.weights.mul(first.difference).add(steps.weights.mul(of_weights.sub(delta)));
  const at::Tensor of_dots = before_options(grad, steps);                                    // w
  const at::Tensor change_of_dots = change_before_options(change, of_dots, changes, steps);  // wdot
  return gradients_of(call, [&](Argument argument) -> at::Tensor {
    switch (argument) {
      case arg::grad_output:
        return output_tangent(call, steps, changes);
      case arg::grad_logsumexp:
        return changes.lse.squeeze(-1);
      case arg::query: {
        const at::Tensor sum = at::matmul(change_of_dots, steps.key);
        if (!call.has(arg::key_tangent)) return sum.mul(steps.scale);
        const at::Tensor key = for_each_head(call, call[arg::key_tangent], type);
        return sum.add(at::matmul(of_dots, key)).mul(steps.scale);
      }
      case arg::key: {
        const at::Tensor sum = at::matmul(change_of_dots.transpose(-2, -1), steps.query);
        if (!call.has(arg::query_tangent)) return sum.mul(steps.scale);
        const at::Tensor query = call[arg::query_tangent].to(type);
        return sum.add(at::matmul(of_dots.transpose(-2, -1), query)).mul(steps.scale);
      }
      case arg::value:
        if (!grad_output.defined()) return at::zeros_like(steps.value);
        return at::matmul(after_dropout(changes.weights, steps).transpose(-2, -1), grad_output);
      case arg::sinks: {
        at::Tensor share = delta.sub(changes.lse.mul(first.delta));
        if (call.has(arg::sinks_tangent))
          share = share.add(first.delta.mul(per_head(call[arg::sinks_tangent], steps)));
        return sum_of_rows(steps.sink_weights.mul(share)).neg();
      }
      default:
        return gradient_of_option(argument, change, steps);
    }
  });
}

}  // namespace qkv::ops
