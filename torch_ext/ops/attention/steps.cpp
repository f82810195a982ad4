#include "ops/attention/steps.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/new_ones.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/SymInt.h>

#include <limits>
#include <vector>

#include "autograd/run.h"
#include "call/check.h"
#include "ops/weights/weights.h"

namespace qkv::ops {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Whether the heads of key or value are shared by enable_gqa rather than by broadcasting.
bool is_grouped(const Call& call, const at::Tensor& tensor) {
  return call.options.enable_gqa && tensor.dim() > 2 && call[arg::query].dim() > 2 &&
         tensor.sym_size(-3) != call[arg::query].sym_size(-3);
}

// What dropout keeps. The set follows from the seed and the place of a weight alone, so that it is
// taken off the weights of an attention in which all are equal.
at::Tensor kept_weights(const Call& call, const Steps& steps) {
  const at::Tensor rows = at::zeros_like(steps.weights.sum(-1, /*keepdim=*/true));
  const at::Tensor keys = at::zeros_like(steps.weights.sum(-2, /*keepdim=*/true)).transpose(-2, -1);
  Call weights(weights_forward);
  weights.set(arg::query, rows);
  weights.set(arg::key, keys);
  weights.set(arg::dropout_seed, call[arg::dropout_seed]);
  weights.options.dropout_p = call.options.dropout_p;
  const double p = call.options.dropout_p;
  return run(weights)[0].gt(0).to(steps.weights.scalar_type()).mul(p < 1 ? 1 / (1 - p) : 0);
}

// How far key j lies ahead of query i, as int64 [L, S]: where the last ones are side by side, or,
// if top_left, the first ones.
at::Tensor ahead(const at::Tensor& scores, bool top_left) {
  const c10::SymInt queries = scores.sym_size(-2), keys = scores.sym_size(-1);
  const auto count = [&](c10::SymIntArrayRef shape, int64_t dim) {
    return scores.new_ones_symint(shape, scores.options().dtype(at::kLong)).cumsum(dim);
  };
  const at::Tensor difference = count({1, keys}, 1).sub(count({queries, 1}, 0));
  return top_left ? difference : difference.sub(c10::Scalar(keys - queries));
}

at::Tensor hide_positions(const Options& options, at::Tensor scores) {
  const auto hide = [&](const at::Tensor& hidden) {
    scores = scores.masked_fill(hidden, -kInfinity);
  };
  if (options.is_causal) hide(ahead(scores, /*top_left=*/true).gt(0));
  const auto is_open = [](const c10::SymInt& side) { return side.maybe_as_int() == -1; };
  const Window& window = options.window_size;
  if (!is_open(window.left)) hide(ahead(scores, false).lt(c10::Scalar(-window.left)));
  if (!is_open(window.right)) hide(ahead(scores, false).gt(c10::Scalar(window.right)));
  return scores;
}

// [..., H, L, S], also where only value has some of the leading dimensions.
at::Tensor scores_of(const Call& call, const Sizes<c10::SymInt>& sizes, Steps& steps) {
  at::Tensor scores = at::matmul(steps.query, steps.key.transpose(-2, -1)).mul(steps.scale);
  scores = scores.expand_symint(sizes.scores());
  steps.softcap = call.options.softcap;
  if (steps.softcap > 0)
    scores = (steps.tanhs = at::tanh(scores.div(steps.softcap))).mul(steps.softcap);
  steps.weights = scores;  // for their shape, until there are weights
  if (call.has(arg::alibi_slopes))
    scores = scores.sub(distances(steps).mul(per_head(call[arg::alibi_slopes], steps)));
  for (const Argument argument : kMaskArguments) {
    if (!call.has(argument)) continue;
    const at::Tensor& mask = call[argument];
    scores = mask.scalar_type() == at::kBool
                 ? scores.masked_fill(mask.logical_not(), -kInfinity)
                 : scores.add(spread(mask.to(scores.scalar_type()), scores.sym_sizes()));
  }
  return hide_positions(call.options, scores);
}

at::Tensor reduced_gradient(const at::Tensor& grad, const Steps& steps, Reduce reduce) {
  if (reduce == Reduce::queries) return grad.unsqueeze(-2);
  if (reduce == Reduce::none || steps.weights.dim() == 2) return grad;
  return grad.unsqueeze(-3).div(c10::Scalar(steps.weights.sym_size(-3)));
}

}  // namespace

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
  at::Tensor logits = scores_of(call, sizes, steps);
  const c10::SymInt keys = logits.sym_size(-1);
  // The softmax of nothing but -inf, and its derivatives, would be NaN. A finite sink prevents it.
  at::Tensor dead = logits.eq(-kInfinity).all(-1, /*keepdim=*/true);
  at::Tensor sinks;
  if (call.has(arg::sinks)) {
    sinks = per_head(call[arg::sinks], steps);
    dead = dead.logical_and(sinks.isfinite().logical_not());
    logits = at::cat({logits, sinks}, -1);
  }
  logits = logits.masked_fill(dead, 0);
  // Not at::softmax: the last digits of its derivative depend on the number of threads. The
  // exponentials are relative to a number that cancels out, and takes no part in derivatives.
  const at::Tensor base = at::logsumexp(logits.detach(), -1, /*keepdim=*/true);
  const at::Tensor exponentials = logits.sub(base).exp();
  const at::Tensor sum = exponentials.sum(-1, /*keepdim=*/true);
  const at::Tensor weights = exponentials.div(sum).masked_fill(dead, 0);
  steps.weights = weights.narrow_symint(-1, 0, keys);
  steps.lse = sum.log().add(base).masked_fill(dead, -kInfinity);
  if (sinks.defined()) {
    const at::Tensor is_none = sinks.eq(-kInfinity);
    const at::Tensor alone = sinks.masked_fill(is_none, -kInfinity);  // has no gradient if none
    steps.sink_weights = at::where(dead, is_none.logical_not(), weights.narrow_symint(-1, keys, 1));
    steps.lse = at::where(dead, alone, steps.lse);
  }
  if (call.options.dropout_p > 0) steps.kept = kept_weights(call, steps);
  return steps;
}

at::Tensor after_dropout(const at::Tensor& weights, const Steps& steps) {
  return steps.kept.defined() ? weights.mul(steps.kept) : weights;
}

at::Tensor for_each_head(const Call& call, const at::Tensor& tensor, at::ScalarType type) {
  if (!is_grouped(call, tensor)) return tensor.to(type);
  const c10::SymInt group = call[arg::query].sym_size(-3) / tensor.sym_size(-3);
  return at::repeat_interleave_symint(tensor.to(type), group, -3);
}

at::Tensor distances(const Steps& steps) {
  return ahead(steps.weights, /*top_left=*/false).abs().to(steps.weights.scalar_type());
}

at::Tensor per_head(const at::Tensor& tensor, const Steps& steps) {
  const at::Tensor numbers = tensor.to(steps.weights.scalar_type());
  auto sizes = steps.weights.sym_sizes().vec();
  sizes.back() = 1;
  return spread(steps.weights.dim() == 2 ? numbers.squeeze() : numbers.unsqueeze(-1).unsqueeze(-1),
                sizes);
}

at::Tensor spread(const at::Tensor& tensor, c10::SymIntArrayRef sizes) {
  std::vector<c10::SymInt> now(sizes.size() - size_t(tensor.dim()), 1);
  for (const c10::SymInt& size : tensor.sym_sizes()) now.push_back(size);
  at::Tensor result = tensor;
  for (size_t d = 0; d < sizes.size(); ++d) {
    now[d] = sizes[d];
    result = result.expand_symint(now);
  }
  return result;
}

at::Tensor gathered(at::Tensor tensor, c10::SymIntArrayRef sizes) {
  const int64_t lead = tensor.dim() - int64_t(sizes.size());
  for (int64_t d = tensor.dim() - 1; d >= 0; --d)
    if (d < lead || sizes[size_t(d - lead)] == 1) tensor = tensor.sum(d, /*keepdim=*/d >= lead);
  return tensor;
}

Changes changes_of(const Call& call, const Steps& steps) {
  const at::ScalarType type = steps.weights.scalar_type();
  Changes changes;
  const auto add_dots = [&](const at::Tensor& rows, const at::Tensor& columns) {
    const at::Tensor dots = at::matmul(rows, columns.transpose(-2, -1)).mul(steps.scale);
    changes.dots = changes.dots.defined() ? changes.dots.add(dots) : dots;
  };
  if (call.has(arg::query_tangent)) add_dots(call[arg::query_tangent].to(type), steps.key);
  if (call.has(arg::key_tangent))
    add_dots(steps.query, for_each_head(call, call[arg::key_tangent], type));
  at::Tensor scores = at::zeros_like(steps.weights);
  if (changes.dots.defined())
    scores = scores.add(steps.tanhs.defined()
                            ? changes.dots.mul(steps.tanhs.mul(steps.tanhs).neg().add(1))
                            : changes.dots);
  if (call.has(arg::alibi_slopes_tangent))
    scores = scores.sub(distances(steps).mul(per_head(call[arg::alibi_slopes_tangent], steps)));
  for (const Argument mask : kMaskArguments)
    if (call.has(tangent_of(mask)))
      scores = scores.add(spread(call[tangent_of(mask)].to(type), scores.sym_sizes()));
  scores = scores.masked_fill(steps.weights.eq(0), 0);
  const at::Tensor weighted = steps.weights.mul(scores);
  changes.lse = weighted.sum(-1, /*keepdim=*/true);
  if (call.has(arg::sinks_tangent))
    changes.lse =
        changes.lse.add(steps.sink_weights.mul(per_head(call[arg::sinks_tangent], steps)));
  changes.weights = weighted.sub(steps.weights.mul(changes.lse));
  return changes;
}

at::Tensor output_tangent(const Call& call, const Steps& steps, const Changes& changes) {
  const at::Tensor through_weights = at::matmul(after_dropout(changes.weights, steps), steps.value);
  if (!call.has(arg::value_tangent)) return through_weights;
  const at::Tensor tangent =
      for_each_head(call, call[arg::value_tangent], steps.value.scalar_type());
  return through_weights.add(at::matmul(after_dropout(steps.weights, steps), tangent));
}

FirstDerivative first_derivative(const Call& call, const Steps& steps) {
  at::Tensor of_weights = at::zeros_like(steps.weights);
  const at::ScalarType type = of_weights.scalar_type();
  if (call.has(arg::grad_output))
    of_weights = at::matmul(call[arg::grad_output].to(type), steps.value.transpose(-2, -1));
  if (call.has(arg::grad_weights))
    of_weights = of_weights.add(
        reduced_gradient(call[arg::grad_weights].to(type), steps, call.options.reduce));
  FirstDerivative first;
  first.of_weights = after_dropout(of_weights, steps);
  first.delta = first.of_weights.mul(steps.weights).sum(-1, /*keepdim=*/true);
  if (call.has(arg::grad_logsumexp))
    first.delta = first.delta.sub(call[arg::grad_logsumexp].unsqueeze(-1));
  first.difference = first.of_weights.sub(first.delta);
  return first;
}

at::Tensor before_options(const at::Tensor& grad_scores, const Steps& steps) {
  if (!steps.tanhs.defined()) return grad_scores;
  return grad_scores.sub(grad_scores.mul(steps.tanhs).mul(steps.tanhs));
}

at::Tensor change_before_options(const at::Tensor& change, const at::Tensor& of_dots,
                                 const Changes& changes, const Steps& steps) {
  const at::Tensor before = before_options(change, steps);
  if (!steps.tanhs.defined() || !changes.dots.defined()) return before;
  return before.add(of_dots.mul(changes.dots).mul(steps.tanhs).mul(-2 / steps.softcap));
}

at::Tensor gradient_of_option(Argument argument, const at::Tensor& grad_scores,
                              const Steps& steps) {
  return argument == arg::alibi_slopes ? grad_scores.mul(distances(steps)).sum(-1).sum(-1).neg()
                                       : grad_scores;
}

at::Tensor reduced(const Call& call, Argument argument, at::Tensor gradient) {
  const at::Tensor& tensor = call[argument];
  if ((argument == arg::key || argument == arg::value) && is_grouped(call, tensor)) {
    const c10::SymInt heads = tensor.sym_size(-3);
    gradient =
        gradient.unflatten_symint(-3, {heads, call[arg::query].sym_size(-3) / heads}).sum(-3);
  }
  if (gradient.dim() < tensor.dim()) gradient = gradient.view_symint(tensor.sym_sizes());
  return gathered(std::move(gradient), tensor.sym_sizes()).to(tensor.scalar_type());
}

}  // namespace qkv::ops
