#include "call/from_options.h"
#include "call/values.h"
#include "ops/attention/attention.h"
#include "qkv/attention.h"

namespace qkv {
namespace ops {
namespace {

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

}  // namespace
}  // namespace ops

namespace {

Call call_with(const Operator& op, const at::Tensor& query, const at::Tensor& key,
               const at::Tensor& value, const AttentionOptions& options,
               std::optional<std::string_view> reduce) {
  Call call = call_of(op, query, key, value, options);
  if (reduce) call.options.reduce = Value<Reduce>::called(*reduce, op.title);
  return call;
}

}  // namespace

at::Tensor attention_weights(const at::Tensor& query, const at::Tensor& key,
                             const AttentionOptions& options,
                             std::optional<std::string_view> reduce) {
  return ops::weights.kernels.composite(
      call_with(ops::weights, query, key, kNone, options, reduce))[0];
}

std::tuple<at::Tensor, at::Tensor> attention_with_weights(const at::Tensor& query,
                                                          const at::Tensor& key,
                                                          const at::Tensor& value,
                                                          const AttentionOptions& options,
                                                          std::optional<std::string_view> reduce) {
  return pair_of(ops::with_weights.kernels.composite(
      call_with(ops::with_weights, query, key, value, options, reduce)));
}

}  // namespace qkv
