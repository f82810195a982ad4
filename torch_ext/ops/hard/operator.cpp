// qkv::hard_attention: the value at the best key.
#include <ATen/ATen.h>

#include "autograd/run.h"
#include "call/from_options.h"
#include "ops/attention/attention.h"
#include "qkv/attention.h"
#include "tensors/compute.h"

namespace qkv {
namespace ops {
namespace {

// [..., H, L, *] as [..., heads, H / heads * L, *]: query heads that share one of `heads` are more
// of its queries.
at::Tensor grouped(const at::Tensor& tensor, int64_t heads) {
  const int64_t all = tensor.size(-3);
  return tensor.unflatten(-3, {heads, all / heads}).flatten(-3, -2);
}

// Every row of grad_output goes to the row of value that was chosen; those that chose the same
// are added up in their order.
at::Tensor grad_value_of(const Call& call, const Sizes<int64_t>& sizes) {
  const at::Tensor &value = call[arg::value], &chosen = call[arg::index];
  at::Tensor result = empty_gradient<int64_t>(value);
  if (chosen.numel() == 0 || sizes.seqlen_k == 0) return result.zero_();
  const auto with_heads = [&](const at::Tensor& t) { return sizes.has_heads ? t : t.unsqueeze(0); };
  const at::Tensor index = with_heads(chosen.unsqueeze(-1));
  // No key was chosen: adds 0 to the first.
  const at::ScalarType type = compute_type(value.scalar_type());
  const at::Tensor grad = grouped(
      with_heads(call[arg::grad_output]).to(type).masked_fill(index.lt(0), 0), sizes.value_heads);
  const at::Tensor rows = grouped(index.clamp_min(0), sizes.value_heads).expand_as(grad);
  const at::Tensor sum =
      at::zeros(sizes.tensor(sizes.value_heads, sizes.seqlen_k, sizes.head_dim_v),
                value.options().dtype(type));
  with_heads(sum).scatter_add_(-2, rows, grad);
  return result.copy_(sum.sum_to_size(value.sizes()));
}

// Sets the gradients that soft attention, with the same options and grad_output, would give.
void set_soft_gradients(const Call& call, Gradients& gradients) {
  Call soft = call.as(attention_backward);
  soft.output_mask.set(arg::value, false);
  if (!soft.output_mask.any()) return;
  const Tensors results = attention_forward_cpu(call.as(attention_forward));
  soft.set(arg::output, results[0]);
  soft.set(arg::logsumexp, results[1]);
  Tensors computed = attention_backward_cpu(soft);
  for (size_t i = 0; i < computed.size(); ++i)
    gradients[soft.op->results[i]] = std::move(computed[i]);
}

Tensors hard_forward_cpu(const Call& call) {
  HardResult result;
  return compute(call, {&result.output, &result.index}, /*tangents=*/nullptr,
                 [&](const Problem& p) { attention_hard(p, result); });
}

Tensors hard_backward_cpu(const Call& call) {
  const auto sizes = check<int64_t>(call);
  Gradients gradients;
  if (call.options.straight_through) set_soft_gradients(call, gradients);
  if (call.output_mask[arg::value]) gradients[arg::value] = grad_value_of(call, sizes);
  Tensors results;
  for (const Argument argument : call.op->results)
    results.push_back(std::move(gradients[argument]));
  return results;
}

// Which key is best does not change with a small step of query or key.
bool differentiates(const Call& call, Argument argument) {
  return argument == arg::value || call.options.straight_through;
}

// The change of the value that was chosen, which the same lookup finds in the values' changes; with
// straight_through also how attention's output changes with all but the values, which are constants
// there: forward mode of forward mode is the derivative of this sum.
Tensors hard_forward_mode(const Call& call) {
  Tensors results = run(call);
  at::Tensor tangent;
  if (call.has(arg::value_tangent)) {
    Call lookup = call;
    lookup.options.straight_through = false;
    lookup.set(arg::value, call[arg::value_tangent]);
    tangent = run(lookup)[0];
  }
  if (call.options.straight_through) {
    Call soft = call.as(attention_forward_jvp);
    const at::Tensor values = call[arg::value].detach();
    soft.set(arg::value, values);
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
    "window_size=, " QKV_SCORE_KEYWORDS ", straight_through=, " QKV_PROGRAM_KEYWORDS
    ") -> output, index",
    {.composite = &hard_composite});

}  // namespace
}  // namespace ops

std::tuple<at::Tensor, at::Tensor> hard_attention(const at::Tensor& query, const at::Tensor& key,
                                                  const at::Tensor& value,
                                                  const AttentionOptions& options,
                                                  bool straight_through) {
  TORCH_CHECK_VALUE(options.dropout_p() == 0, "hard_attention: dropout_p is ", options.dropout_p(),
                    ", but 0 is expected: there is no dropout");
  TORCH_CHECK(!tensor_of(options.sinks()).defined(),
              "hard_attention: sinks is given, but nullopt is expected: "
              "sinks do not take part");
  Call call = call_of(ops::hard, query, key, value, options);
  call.options.straight_through = straight_through;
  return pair_of(ops::hard_composite(call));
}

}  // namespace qkv
