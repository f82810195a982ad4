// attention_weights and attention_with_weights. The kernels' forward pass makes the weights anyway,
// and hands them out; the sum over the queries is made by the backward pass.
#include <ATen/ATen.h>
#include <c10/util/strides.h>

#include <algorithm>

#include "call/from_options.h"
#include "call/values.h"
#include "ops/attention/attention.h"
#include "qkv/attention.h"
#include "tensors/gradients.h"
#include "tensors/large_memory.h"
#include "tensors/layout.h"

namespace qkv {
namespace ops {
namespace {

// [..., H, S]: sum_i weight_ij is the gradient of a value with one column, under a grad_output of
// ones. There is one such value for each query head.
at::Tensor sum_over_queries(const Call& call, Sizes<int64_t> sizes, const at::Tensor& lse,
                            ScoreWay way) {
  sizes.value_heads = sizes.heads;
  sizes.head_dim_v = 1;
  const at::TensorOptions options = call[arg::query].options();
  at::Tensor sums = at::zeros(sizes.weights(Reduce::queries), options);
  const at::Tensor columns = sums.unsqueeze(-1);
  const at::Tensor zero = at::zeros({1, 1}, options), one = at::ones({1, 1}, options);
  KernelCall kernel(call, sizes);
  BackwardArgs args;
  kernel.bind(args.lse, lse, Shape::row);
  kernel.bind(args.grad_value, columns, Shape::tensor);
  kernel.bind(kernel.problem.value, zero, Shape::tensor);
  kernel.bind(args.output, zero, Shape::tensor);
  kernel.bind(args.grad_output, one, Shape::tensor);
  kernel.set_strides();
  kernel.problem.score_way = way;
  if (has_queries(kernel.problem)) qkv::attention_backward(kernel.problem, args);
  return sums;
}

// The gradient of every weight, [..., H or 1, L or 1, S] in the compute type.
at::Tensor grad_of_each(const Call& call, const Sizes<int64_t>& sizes) {
  const at::Tensor grad = widened(call[arg::grad_weights]);
  if (call.options.reduce == Reduce::queries) return grad.unsqueeze(-2);
  return call.options.reduce == Reduce::heads ? grad.div(sizes.heads).unsqueeze(-3) : grad;
}

// Both, of which the one without a value has no output, and no gradient of a value.
Tensors weights_forward_cpu(const Call& call) {
  const auto sizes = check<int64_t>(call);
  const Reduce reduce = call.options.reduce;
  const bool has_output = call.op->takes(arg::value);
  at::Tensor output, lse = empty_result(call, sizes, arg::logsumexp);
  at::Tensor weights, by_head;  // in the compute type; the second has a dimension for the heads
  KernelCall kernel(call, sizes);
  ForwardResult result;
  kernel.bind(result.lse, lse, Shape::row);
  if (has_output) {
    output = empty_result(call, sizes, arg::output);
    kernel.bind(result.output, output, Shape::output);
  }
  if (reduce != Reduce::queries) {
    const auto shape = sizes.weights(reduce);
    by_head = weights =
        zeros(shape, c10::contiguous_strides(shape), compute_type(call[arg::query].scalar_type()));
    if (reduce == Reduce::heads) {
      by_head = weights.unsqueeze(-3);  // one head for all: added up
      result.weights_factor = 1.0 / double(std::max<int64_t>(1, sizes.heads));
    }
    kernel.bind(result.weights, by_head, Shape::weights);
  }
  kernel.set_strides();
  qkv::attention_forward(kernel.problem, result);
  if (reduce == Reduce::queries)
    weights = sum_over_queries(call, sizes, lse, score_way_of(kernel.problem));
  weights = weights.to(call[arg::query].scalar_type());
  if (!has_output) return {std::move(weights), std::move(lse)};
  return {std::move(output), std::move(weights), std::move(lse)};
}

Tensors weights_backward_cpu(const Call& call) {
  if (!call.has(arg::grad_weights)) return attention_backward_cpu(call.as(attention_backward));
  const auto sizes = check<int64_t>(call);
  const at::Tensor grad_weights = grad_of_each(call, sizes);
  const GradientTensors gradients(call, sizes);
  gradients.run_wide(nullptr, [&](Call wide) {
    wide.set(arg::output, kNone);  // which knows nothing of grad_weights
    KernelCall kernel(wide, sizes);
    BackwardArgs args;
    kernel.bind(args.grad_weights, grad_weights, Shape::weights);
    run_backward(kernel, args, gradients);
  });
  return gradients.results();
}

const OperatorKernels kForward = {.cpu = &weights_forward_cpu,
                                  .composition = &attention_composition};
const OperatorKernels kBackward = {.cpu = &weights_backward_cpu};
const std::string kWeightsTensors = QKV_SCORE_TENSORS ", sinks?, dropout_seed?, *, ";
const std::string kWeightsOptions = "dropout_p, is_causal, " QKV_SCORE_OPTIONS ", reduce, scores=";
// attention's arguments after the value, in its order and with its defaults, then ours.
const std::string kWeightsSignature =
    ", attn_mask?=, dropout_p=, is_causal=, *, scale=, enable_gqa=, "
    "window_size=, " QKV_SCORE_KEYWORDS ", sinks?=, reduce=, " QKV_PROGRAM_KEYWORDS ")";

}  // namespace

DefinedOperator weights_forward("attention_weights",
                                "weights_forward(query, key, " + kWeightsTensors + kWeightsOptions +
                                    ") -> weights, logsumexp",
                                kForward);
DefinedOperator with_weights_forward("attention_with_weights",
                                     "with_weights_forward(query, key, value, " + kWeightsTensors +
                                         kWeightsOptions + ") -> output, weights, logsumexp",
                                     kForward);

namespace {

DefinedOperator weights_backward(weights_forward, "weights_backward(grad_weights; logsumexp)",
                                 kBackward);
DefinedOperator with_weights_backward(with_weights_forward,
                                      "with_weights_backward(grad_output?, grad_weights?; output, "
                                      "logsumexp)",
                                      kBackward);

template <const DefinedOperator& forward>
Tensors without_lse(const Call& call) {
  check_query(call);
  Tensors results = attend(call, forward);
  results.pop_back();
  return results;
}

DefinedOperator weights("attention_weights",
                        "attention_weights(query, key" + kWeightsSignature + " -> weights",
                        {.composite = &without_lse<weights_forward>});
DefinedOperator with_weights("attention_with_weights",
                             "attention_with_weights(query, key, value" + kWeightsSignature +
                                 " -> output, weights",
                             {.composite = &without_lse<with_weights_forward>});

Call call_with(const Operator& op, const at::Tensor& query, const at::Tensor& key,
               const at::Tensor& value, const AttentionOptions& options,
               std::optional<std::string_view> reduce) {
  Call call = call_of(op, query, key, value, options);
  if (reduce) call.options.reduce = Value<Reduce>::called(*reduce, op.title);
  return call;
}

}  // namespace
}  // namespace ops

at::Tensor attention_weights(const at::Tensor& query, const at::Tensor& key,
                             const AttentionOptions& options,
                             std::optional<std::string_view> reduce) {
  return ops::weights.kernels.composite(
      ops::call_with(ops::weights, query, key, kNone, options, reduce))[0];
}

std::tuple<at::Tensor, at::Tensor> attention_with_weights(const at::Tensor& query,
                                                          const at::Tensor& key,
                                                          const at::Tensor& value,
                                                          const AttentionOptions& options,
                                                          std::optional<std::string_view> reduce) {
  return pair_of(ops::with_weights.kernels.composite(
      ops::call_with(ops::with_weights, query, key, value, options, reduce)));
}

}  // namespace qkv
