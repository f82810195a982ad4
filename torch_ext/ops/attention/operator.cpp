#include <c10/core/SymInt.h>

#include "call/autocast.h"
#include "call/check.h"
#include "call/from_options.h"
#include "call/run.h"
#include "ops/attention/attention.h"
#include "ops/attention/composition.h"
#include "ops/attention/jvp.h"
#include "ops/dropout/dropout.h"
#include "qkv/attention.h"
#include "tensors/layout.h"

namespace qkv {
namespace ops {
namespace {

Tensors attention_composite(const Call& call) {
  check_query(call);
  if (is_elsewhere(call)) return attend_elsewhere(call);
  Call output_alone = call;
  output_alone.wants_lse = false;
  return {std::move(attend(std::move(output_alone))[0])};
}

Tensors attention_with_lse_composite(const Call& call) {
  check_query(call);
  if (is_elsewhere(call)) return attend_elsewhere(call);
  return attend(call);
}

Tensors forward_meta(const Call& call) { return empty_results(call, check<c10::SymInt>(call)); }

Tensors backward_meta(const Call& call) {
  check<c10::SymInt>(call);
  if (!call.has(arg::grad_output) && !call.has(arg::grad_logsumexp)) return no_results(call);
  return empty_gradients(call);
}

// For those who call attention_forward themselves: _jagged.py.
Tensors forward_autocast(const Call& call) {
  Call cast = call;
  const Autocast autocast(cast);
  return run(cast);
}

// scaled_dot_product_attention's arguments, in its order and with its defaults, then ours.
const std::string kArguments =
    "(query, key, value, attn_mask?=, dropout_p=, is_causal=, *, scale=, enable_gqa=, "
    "window_size=, " QKV_SCORE_KEYWORDS ", sinks?=)";

Operator attention("attention", "attention" + kArguments + " -> output",
                   {.composite = &attention_composite});
Operator attention_with_lse("attention",
                            "attention_with_lse" + kArguments + " -> output, logsumexp",
                            {.composite = &attention_with_lse_composite});

}  // namespace

// What both are made of, and varlen_attention. Which weights dropout keeps follows from
// dropout_seed, so that it is drawn when a compiled program runs, and is the same again in the
// backward pass.
Operator attention_forward("attention",
                           "attention_forward(query, key, value, " QKV_SCORE_TENSORS
                           ", sinks?, dropout_seed?, cu_seq_q?, "
                           "cu_seq_k?, seqused_k?, *, dropout_p, is_causal, " QKV_SCORE_OPTIONS
                           ") -> output, logsumexp",
                           {.cpu = &attention_forward_cpu,
                            .meta = &forward_meta,
                            .autocast = &forward_autocast,
                            .composition = &attention_forward_composition,
                            .composes = &composes_attention});
Operator attention_backward(attention_forward,
                            "attention_backward(grad_output?, grad_logsumexp?; output, logsumexp)",
                            {.cpu = &attention_backward_cpu,
                             .meta = &backward_meta,
                             .composition = &attention_backward_composition,
                             .composes = &composes_attention});

namespace {

Operator attention_forward_jvp(
    "attention",
    "attention_forward_jvp(query, key, value, " QKV_SCORE_TENSORS
    ", sinks?, dropout_seed?, query_tangent?, key_tangent?, value_tangent?, attn_mask_tangent?, "
    "bias_tangent?, alibi_slopes_tangent?, sinks_tangent?, *, dropout_p, "
    "is_causal, " QKV_SCORE_OPTIONS ") -> output, logsumexp, output_tangent, logsumexp_tangent",
    {.cpu = &attention_jvp_cpu,
     .meta = &attention_jvp_meta,
     .composition = &attention_jvp_composition,
     .composes = &composes_attention});

}  // namespace

TORCH_LIBRARY_FRAGMENT(qkv, m) {
  attention_forward.jvp = &attention_forward_jvp;
  for (Operator* op : {&attention, &attention_with_lse, &attention_forward, &attention_forward_jvp,
                       &attention_backward})
    op->define(m);
}

void check_query(const Call& call) {
  TORCH_CHECK(call.has(arg::query), call.title(), ": query is an undefined tensor");
}

Tensors attend(Call call, const Operator& op) {
  const Autocast autocast(call);
  const Seed seed(call);
  call.op = &op;
  return run(call);
}

}  // namespace ops

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const AttentionOptions& options) {
  return ops::attention.kernels.composite(call_of(ops::attention, query, key, value, options))[0];
}

std::tuple<at::Tensor, at::Tensor> attention_with_lse(const at::Tensor& query,
                                                      const at::Tensor& key,
                                                      const at::Tensor& value,
                                                      const AttentionOptions& options) {
  return pair_of(ops::attention_with_lse.kernels.composite(
      call_of(ops::attention_with_lse, query, key, value, options)));
}

}  // namespace qkv
