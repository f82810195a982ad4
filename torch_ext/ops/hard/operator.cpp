#include "autograd/run.h"
#include "call/from_options.h"
#include "ops/attention/attention.h"
#include "ops/hard/hard.h"
#include "qkv/attention.h"

namespace qkv {
namespace ops {
namespace {

// Which key is best does not change with a small step of query or key.
bool differentiates(const Call& call, Argument argument) {
  return argument == arg::value || call.options.straight_through;
}

// The change of the value that was chosen, which the same lookup finds in the values' changes; with
// straight_through also how attention's output changes with all but the values.
Tensors hard_forward_mode(const Call& call) {
  Tensors results = run(call);
  at::Tensor tangent;
  if (call.has(arg::value_tangent)) {
    Call lookup = call;
    lookup.set(arg::value, call[arg::value_tangent]);
    tangent = run(lookup)[0];
  }
  if (call.options.straight_through) {
    Call soft = call.as(attention_forward_jvp);
    soft.set(arg::value_tangent, kNone);
    const at::Tensor change = run(soft)[2];
    tangent = tangent.defined() ? tangent.add(change) : change;
  }
  results.push_back(std::move(tangent));
  results.emplace_back();  // index
  return results;
}

DefinedOperator hard_forward(
    "hard_attention",
    "hard_forward(query, key, value, " QKV_SCORE_TENSORS ", *, is_causal, " QKV_SCORE_OPTIONS
    ", straight_through) -> output, index",
    {.cpu = &hard_forward_cpu, .differentiates = &differentiates, .jvp = &hard_forward_mode});
DefinedOperator hard_backward(hard_forward, "hard_backward(grad_output; index)",
                              {.cpu = &hard_backward_cpu, .differentiates = &differentiates});

Tensors hard_composite(const Call& call) {
  check_query(call);
  return run_cast(call.as(hard_forward));
}

DefinedOperator hard(
    "hard_attention",
    "hard_attention(query, key, value, attn_mask?=, is_causal=, *, scale=, enable_gqa=, "
    "window_size=, " QKV_SCORE_KEYWORDS ", straight_through=) -> output, index",
    {.composite = &hard_composite});

}  // namespace
}  // namespace ops

std::tuple<at::Tensor, at::Tensor> hard_attention(const at::Tensor& query, const at::Tensor& key,
                                                  const at::Tensor& value,
                                                  const AttentionOptions& options,
                                                  bool straight_through) {
  TORCH_CHECK_VALUE(options.dropout_p() == 0, "hard_attention: dropout_p is ", options.dropout_p(),
                    ", but 0 is expected: there is no dropout");
  TORCH_CHECK(!options.sinks(),
              "hard_attention: sinks is given, but nullopt is expected: "
              "sinks do not take part");
  Call call = call_of(ops::hard, query, key, value, options);
  call.options.straight_through = straight_through;
  return pair_of(ops::hard_composite(call));
}

}  // namespace qkv
