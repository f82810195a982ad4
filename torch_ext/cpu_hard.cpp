// Dispatch key CPU: hard_attention, the value at the best key.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "copies.h"
#include "cpu.h"
#include "layout.h"
#include "ops.h"
#include "problem.h"

namespace qkv {
namespace {

OutputAndIndex hard_cpu(const Hard& call) {
  const Forward& f = call.forward;
  const auto sizes = check<int64_t>(f);
  if (!is_aligned(f)) return hard_cpu({*CopiedForward(f, aligned), call.straight_through});
  at::Tensor output = std::get<0>(empty_results(f, sizes));
  at::Tensor index = at::empty(sizes.lse(), f.query().options().dtype(at::kLong));
  KernelCall kernel(f, sizes);
  HardResult result;
  kernel.bind(result.output, output, Dims::head_row_column);
  kernel.bind(result.index, index, Dims::head_row);
  kernel.set_strides();
  if (has_queries(kernel.problem)) attention_hard(kernel.problem, result);
  return {std::move(output), std::move(index)};
}

// [..., H, L, *] as [..., heads, H / heads * L, *]: query heads that share one of `heads` are more
// of its queries.
at::Tensor grouped(const at::Tensor& tensor, int64_t heads) {
  const int64_t all = tensor.size(-3);
  return tensor.unflatten(-3, {heads, all / heads}).flatten(-3, -2);
}

// Every row of grad_output goes to the row of value that was chosen; those that chose the same
// are added up in their order.
at::Tensor grad_value_of(const HardBackward& call, const Sizes<int64_t>& sizes) {
  const at::Tensor& value = call.hard.forward.value();
  at::Tensor result = empty_gradient<int64_t>(value);
  if (call.index.numel() == 0 || sizes.seqlen_k == 0) return result.zero_();
  const auto with_heads = [&](const at::Tensor& t) { return sizes.has_heads ? t : t.unsqueeze(0); };
  const at::Tensor index = with_heads(call.index.unsqueeze(-1));
  // No key was chosen: adds 0 to the first.
  const at::ScalarType type = compute_type(value.scalar_type());
  const at::Tensor grad =
      grouped(with_heads(call.grad_output).to(type).masked_fill(index.lt(0), 0), sizes.value_heads);
  const at::Tensor rows = grouped(index.clamp_min(0), sizes.value_heads).expand_as(grad);
  const at::Tensor sum =
      at::zeros(sizes.tensor(sizes.value_heads, sizes.seqlen_k, sizes.head_dim_v),
                value.options().dtype(type));
  with_heads(sum).scatter_add_(-2, rows, grad);
  return result.copy_(sum.sum_to_size(value.sizes()));
}

// What soft attention, with the same options and grad_output, would give.
Gradients soft_gradients(const HardBackward& call) {
  const Forward& f = call.hard.forward;
  OutputMask wanted = call.output_mask;
  wanted[kValue] = false;
  if (std::none_of(wanted.begin(), wanted.end(), [](bool w) { return w; })) return {};
  const auto [output, lse] = cpu::attention_forward(f, /*wants_lse=*/true);
  return cpu::attention_backward({call.grad_output, kNone, f, output, lse, wanted});
}

Gradients hard_backward_cpu(const HardBackward& call) {
  const auto sizes = check<int64_t>(call);
  Gradients gradients = call.hard.straight_through ? soft_gradients(call) : Gradients();
  if (call.output_mask[kValue]) std::get<kValue>(gradients) = grad_value_of(call, sizes);
  return gradients;
}

}  // namespace

TORCH_LIBRARY_IMPL(qkv, CPU, m) {
  using ops::Adapter;
  m.impl("hard_forward", Adapter<&ops::hard_args, &hard_cpu>::call);
  m.impl("hard_backward", Adapter<&ops::hard_backward_args, &hard_backward_cpu>::call);
}

}  // namespace qkv
