#include "ops/attention/composition.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/SymInt.h>

#include <cmath>
#include <limits>

#include "call/check.h"
#include "call/run.h"
#include "ops/attention/attention.h"
#include "ops/weights/weights.h"

namespace qkv::ops {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The steps of a call, in the compute type.
struct Steps {
  // No value: for the weights alone.
  at::Tensor query, key, value;  // each with a head for every head of query, or one for all
  c10::SymFloat scale;
  at::Tensor scores, dead;   // dead [..., L, 1]: whether a row has nothing to attend to
  at::Tensor weights, kept;  // kept: 1 / (1 - dropout_p) where dropout keeps a weight, else 0
};

// Whether the heads of key or value are shared by enable_gqa rather than by broadcasting.
bool is_grouped(const Call& call, const at::Tensor& tensor) {
  return call.options.enable_gqa && tensor.dim() > 2 && call[arg::query].dim() > 2 &&
         tensor.sym_size(-3) != call[arg::query].sym_size(-3);
}

at::Tensor for_each_head(const Call& call, const at::Tensor& tensor, at::ScalarType type) {
  if (!is_grouped(call, tensor)) return tensor.to(type);
  const c10::SymInt group = call[arg::query].sym_size(-3) / tensor.sym_size(-3);
  return at::repeat_interleave_symint(tensor.to(type), group, -3);
}

// The gradient of an argument from that of its broadcast, whose heads may be those of the group.
at::Tensor reduced(const Call& call, Argument argument, at::Tensor gradient) {
  const at::Tensor& tensor = call[argument];
  if ((argument == arg::key || argument == arg::value) && is_grouped(call, tensor)) {
    const c10::SymInt heads = tensor.sym_size(-3);
    gradient =
        gradient.unflatten_symint(-3, {heads, call[arg::query].sym_size(-3) / heads}).sum(-3);
  }
  return at::sum_to(std::move(gradient), tensor.sym_sizes()).to(tensor.scalar_type());
}

// What dropout keeps. The set follows from the seed and the place of a weight alone, so that it is
// taken off the weights of an attention in which all are equal.
at::Tensor kept_weights(const Call& call, const Steps& steps) {
  const at::Tensor rows = at::zeros_like(steps.scores.sum(-1, /*keepdim=*/true));
  const at::Tensor keys = at::zeros_like(steps.scores.sum(-2, /*keepdim=*/true)).transpose(-2, -1);
  Call weights(weights_forward);
  weights.set(arg::query, rows);
  weights.set(arg::key, keys);
  weights.set(arg::dropout_seed, call[arg::dropout_seed]);
  weights.options.dropout_p = call.options.dropout_p;
  return run(weights)[0].gt(0).to(steps.scores.scalar_type()).div(1 - call.options.dropout_p);
}

// [..., H, L, S], also where only value has some of the leading dimensions.
at::Tensor scores_of(const Call& call, const Sizes<c10::SymInt>& sizes, const Steps& steps) {
  at::Tensor scores = at::matmul(steps.query, steps.key.transpose(-2, -1)).mul(steps.scale);
  scores = scores.expand_symint(sizes.scores());
  for (const Argument argument : kMaskArguments) {
    if (!call.has(argument)) continue;
    const at::Tensor& mask = call[argument];
    scores = mask.scalar_type() == at::kBool ? scores.masked_fill(mask.logical_not(), -kInfinity)
                                             : scores.add(mask.to(scores.scalar_type()));
  }
  if (!call.options.is_causal) return scores;
  const auto seen =
      at::ones_symint({scores.sym_size(-2), scores.sym_size(-1)}, scores.options().dtype(at::kBool))
          .tril();
  return scores.masked_fill(seen.logical_not(), -kInfinity);
}

Steps steps_of(const Call& call) {
  const auto sizes = check<c10::SymInt>(call);
  const at::ScalarType type = compute_type(call[arg::query].scalar_type());
  Steps steps;
  steps.query = call[arg::query].to(type);
  steps.key = for_each_head(call, call[arg::key], type);
  if (call.has(arg::value)) steps.value = for_each_head(call, call[arg::value], type);
  steps.scale = call.options.scale
                    ? c10::SymFloat(*call.options.scale)
                    : c10::SymFloat(1.0) / c10::SymFloat(steps.query.sym_size(-1)).sqrt();
  const at::Tensor scores = scores_of(call, sizes, steps);
  // The softmax of nothing but -inf, and its derivatives, would be NaN.
  steps.dead = scores.eq(-kInfinity).all(-1, /*keepdim=*/true);
  steps.scores = scores.masked_fill(steps.dead, 0);
  steps.weights = at::softmax(steps.scores, -1).masked_fill(steps.dead, 0);
  if (call.options.dropout_p > 0) steps.kept = kept_weights(call, steps);
  return steps;
}

at::Tensor after_dropout(const at::Tensor& weights, const Steps& steps) {
  return steps.kept.defined() ? weights.mul(steps.kept) : weights;
}

at::Tensor reduced_weights(const at::Tensor& weights, Reduce reduce) {
  if (reduce == Reduce::queries) return weights.sum(-2);
  return reduce == Reduce::heads && weights.dim() > 2 ? weights.mean(-3) : weights;
}

// The gradient of the weights after dropout, [..., H, L, S], from that of the reduced ones.
at::Tensor grad_of_each(const at::Tensor& grad, const Steps& steps, Reduce reduce) {
  if (reduce == Reduce::queries) return grad.unsqueeze(-2);
  if (reduce == Reduce::none || steps.weights.dim() == 2) return grad;
  return grad.unsqueeze(-3).div(c10::Scalar(steps.weights.sym_size(-3)));
}

// The gradient of the scores.
at::Tensor grad_scores(const Call& call, const Steps& steps) {
  at::Tensor of_weights = at::zeros_like(steps.weights);
  const at::ScalarType type = of_weights.scalar_type();
  if (call.has(arg::grad_output))
    of_weights = at::matmul(call[arg::grad_output].to(type), steps.value.transpose(-2, -1));
  if (call.has(arg::grad_weights))
    of_weights =
        of_weights.add(grad_of_each(call[arg::grad_weights].to(type), steps, call.options.reduce));
  of_weights = after_dropout(of_weights, steps);
  at::Tensor grad = of_weights.sub(of_weights.mul(steps.weights).sum(-1, /*keepdim=*/true));
  if (call.has(arg::grad_logsumexp)) grad = grad.add(call[arg::grad_logsumexp].unsqueeze(-1));
  return grad.mul(steps.weights);
}

}  // namespace

bool composes_attention(const Call& call) {
  const Options& options = call.options;
  return !call.is_packed() && !call.has(arg::alibi_slopes) && !call.has(arg::sinks) &&
         options.softcap == 0 && options.window_size.left.maybe_as_int() == -1 &&
         options.window_size.right.maybe_as_int() == -1 && options.dropout_p < 1;
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
      results.push_back(
          at::logsumexp(steps.scores, -1).masked_fill(steps.dead.squeeze(-1), -kInfinity));
    }
  }
  return results;
}

// docs/derivatives.md, pass 1.
Tensors attention_jvp_composition(const Call& call) {
  const Steps steps = steps_of(call);
  const at::ScalarType type = steps.weights.scalar_type();
  at::Tensor change = at::zeros_like(steps.scores);  // of the scores
  if (call.has(arg::query_tangent))
    change = change.add(at::matmul(call[arg::query_tangent].to(type), steps.key.transpose(-2, -1))
                            .mul(steps.scale));
  if (call.has(arg::key_tangent)) {
    const at::Tensor key = for_each_head(call, call[arg::key_tangent], type);
    change = change.add(at::matmul(steps.query, key.transpose(-2, -1)).mul(steps.scale));
  }
  for (const Argument mask : kMaskArguments)
    if (call.has(tangent_of(mask))) change = change.add(call[tangent_of(mask)].to(type));
  const at::Tensor weighted = steps.weights.mul(change.masked_fill(steps.weights.eq(0), 0));
  const at::Tensor lse_tangent = weighted.sum(-1, /*keepdim=*/true);
  const at::Tensor of_weights = after_dropout(weighted.sub(steps.weights.mul(lse_tangent)), steps);
  at::Tensor output_tangent = at::matmul(of_weights, steps.value);
  if (call.has(arg::value_tangent))
    output_tangent = output_tangent.add(at::matmul(
        after_dropout(steps.weights, steps), for_each_head(call, call[arg::value_tangent], type)));
  Tensors results = attention_forward_composition(call.as(attention_forward));
  results.push_back(output_tangent.to(call[arg::query].scalar_type()));
  results.push_back(lse_tangent.squeeze(-1));
  return results;
}

Tensors attention_backward_composition(const Call& call) {
  const Steps steps = steps_of(call);
  const at::Tensor grad = grad_scores(call, steps);
  const auto gradient = [&](Argument argument) -> at::Tensor {
    switch (argument) {
      case arg::query:
        return at::matmul(grad, steps.key).mul(steps.scale);
      case arg::key:
        return at::matmul(grad.transpose(-2, -1), steps.query).mul(steps.scale);
      case arg::value:
        if (!call.has(arg::grad_output)) return at::zeros_like(steps.value);
        return at::matmul(after_dropout(steps.weights, steps).transpose(-2, -1),
                          call[arg::grad_output].to(grad.scalar_type()));
      default:
        return grad;  // what is added to the scores
    }
  };
  Tensors results;
  for (const Argument argument : call.op->results)
    results.push_back(call.wants_gradient(argument) ? reduced(call, argument, gradient(argument))
                                                    : at::Tensor());
  return results;
}

}  // namespace qkv::ops
