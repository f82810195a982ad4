// Dispatch key CPU: hard_attention, the value at the best key.
#include <ATen/ops/zeros.h>

#include "ops/attention/attention.h"
#include "ops/hard/hard.h"
#include "tensors/compute.h"

namespace qkv {
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
  Call soft = call.as(ops::attention_backward);
  soft.output_mask.set(arg::value, false);
  if (!soft.output_mask.any()) return;
  const Tensors results = ops::attention_forward_cpu(call.as(ops::attention_forward));
  soft.set(arg::output, results[0]);
  soft.set(arg::logsumexp, results[1]);
  Tensors computed = ops::attention_backward_cpu(soft);
  for (size_t i = 0; i < computed.size(); ++i)
    gradients[soft.op->results[i]] = std::move(computed[i]);
}

}  // namespace

Tensors ops::hard_forward_cpu(const Call& call) {
  HardResult result;
  return compute(call, {&result.output, &result.index}, /*tangents=*/nullptr,
                 [&](const Problem& p) { attention_hard(p, result); });
}

Tensors ops::hard_backward_cpu(const Call& call) {
  const auto sizes = check<int64_t>(call);
  Gradients gradients;
  if (call.options.straight_through) set_soft_gradients(call, gradients);
  if (call.output_mask[arg::value]) gradients[arg::value] = grad_value_of(call, sizes);
  Tensors results;
  for (const Argument argument : call.op->results)
    results.push_back(std::move(gradients[argument]));
  return results;
}

}  // namespace qkv
