#include <ATen/ops/empty.h>
#include <c10/core/SymInt.h>

#include "call/autocast.h"
#include "call/check.h"
#include "call/from_options.h"
#include "call/run.h"
#include "call/values.h"
#include "ops/attention/attention.h"
#include "ops/dropout/dropout.h"
#include "ops/weights/weights.h"
#include "qkv/attention.h"
#include "tensors/layout.h"

namespace qkv {
namespace ops {
namespace {

Tensors weights_meta(const Call& call) {
  const auto sizes = check<c10::SymInt>(call);
  const at::TensorOptions options = call[arg::query].options();
  return {at::empty_symint(sizes.weights(call.options.reduce), options),
          empty_rows(sizes, compute_type(call[arg::query].scalar_type()))};
}

Tensors weights_backward_meta(const Call& call) {
  check<c10::SymInt>(call);
  return empty_gradients(call);
}

}  // namespace

Operator weights_forward("attention_weights",
                         "weights_forward(query, key, " QKV_SCORE_TENSORS
                         ", sinks?, dropout_seed?, *, "
                         "dropout_p, is_causal, " QKV_SCORE_OPTIONS
                         ", reduce) -> weights, logsumexp",
                         {.cpu = &weights_forward_cpu, .meta = &weights_meta});

namespace {

Operator weights_backward(weights_forward, "weights_backward(grad_weights; logsumexp)",
                          {.cpu = &weights_backward_cpu, .meta = &weights_backward_meta});

Tensors weights_composite(const Call& call) {
  check_query(call);
  Call forward = call.as(weights_forward);
  const Autocast autocast(forward);
  const Seed seed(forward);
  return {run(forward)[0]};
}

Operator weights("attention_weights",
                 "attention_weights(query, key, attn_mask?=, dropout_p=, is_causal=, *, scale=, "
                 "enable_gqa=, window_size=, " QKV_SCORE_KEYWORDS ", sinks?=, reduce=) -> weights",
                 {.composite = &weights_composite});

TORCH_LIBRARY_FRAGMENT(qkv, m) {
  for (Operator* op : {&weights, &weights_forward, &weights_backward}) op->define(m);
}

}  // namespace
}  // namespace ops

at::Tensor attention_weights(const at::Tensor& query, const at::Tensor& key,
                             const AttentionOptions& options,
                             std::optional<std::string_view> reduce) {
  Call call = call_of(ops::weights, query, key, kNone, options);
  call.options.reduce = reduce_of(reduce);
  return ops::weights_composite(call)[0];
}

}  // namespace qkv
