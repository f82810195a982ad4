#include "tensors/gradients.h"

#include <ATen/ATen.h>

#include <numeric>

#include "tensors/layout.h"

namespace qkv {
namespace {

// Torch's own sum of many numbers to a single one adds up as many parts as there are threads, so
// that its last digits follow their number. A sum to more than one is cut between these, so here
// are two of the same.
at::Tensor sum_to_one(const at::Tensor& numbers) {
  const at::Tensor all = numbers.flatten();
  return at::stack({all, all}).sum(-1)[0];
}

}  // namespace

GradientTensors::GradientTensors(const Call& call, const Sizes<int64_t>& sizes)
    : call_(call), sizes_(sizes), documents_(documents_of(call, sizes)) {
  const int64_t kv_heads = std::lcm(sizes.key_heads, sizes.value_heads);
  const std::array<Sizes<int64_t>::Shape, 3> shapes = {
      sizes.tensor(sizes.heads, sizes.seqlen_q, sizes.head_dim),
      sizes.tensor(kv_heads, sizes.seqlen_k, sizes.head_dim),
      sizes.tensor(kv_heads, sizes.seqlen_k, sizes.head_dim_v)};
  const auto wants = [&](Argument argument) { return call.wants_gradient(argument); };
  const at::ScalarType own = call[arg::query].scalar_type(), wide = compute_type(own);
  wide_ = own != wide && call.op->order > 1;
  for (const Argument a : {arg::query, arg::key, arg::value})
    wide_ |= own != wide && wants(a) && call[a].numel() != c10::multiply_integers(shapes[a]);
  for (int i = 0; i < arg::kDifferentiable; ++i) {
    const auto a = Argument(i);
    if (!wants(a)) continue;
    if (kArguments[a].shape == Shape::tensor) allocate(a, shapes[a], wide_ ? wide : own);
    if (kArguments[a].shape == Shape::per_head) allocate(a, sizes.per_head(), at::kDouble);
    if (kArguments[a].shape == Shape::mask) allocate_mask(a);
    if (a == arg::score_tables) full_[a] = at::zeros(call[a].sizes(), call[a].options());
  }
}

void GradientTensors::allocate(Argument argument, c10::IntArrayRef shape, at::ScalarType dtype) {
  const at::Tensor& tensor = call_[argument];
  full_[argument] = tensor.sizes() == shape && tensor.scalar_type() == dtype
                        ? empty_gradient<int64_t>(tensor)
                        : at::empty(shape, tensor.options().dtype(dtype));
}

void GradientTensors::allocate_mask(Argument argument) {
  const at::Tensor& mask = call_[argument];
  const bool packed = sizes_.packed;
  const at::ScalarType compute = compute_type(call_[arg::query].scalar_type());
  const int64_t rows = size_from_right<int64_t>(mask, 1),
                columns = size_from_right<int64_t>(mask, 0);
  auto shape = sizes_.lse();
  if (packed ? columns == 1 : columns != sizes_.seqlen_k) {
    sums_[argument] = MaskSum::queries;
  } else if (packed ? rows == 1 : rows != sizes_.seqlen_q) {
    sums_[argument] = MaskSum::keys;
    shape.back() = packed ? sizes_.seqlen_k : columns;
  } else {
    full_[argument] = zero_gradient(mask, compute);
    return;
  }
  full_[argument] = at::empty(shape, mask.options().dtype(compute));
}

void GradientTensors::bind(KernelCall& kernel, BackwardArgs& args) const {
  const auto bind = [&](Output& output, Argument argument) {
    if (full_[argument].defined()) kernel.bind(output, full_[argument], kArguments[argument].shape);
  };
  bind(args.grad_query, arg::query);
  bind(args.grad_key, arg::key);
  bind(args.grad_value, arg::value);
  for (int n = 0; n < kHeadNumbers; ++n) bind(args.grad_by_head[n], kHeadArguments[n]);
  if (full_[arg::score_tables].defined())
    args.grad_tables = full_[arg::score_tables].mutable_data_ptr();
  for (int m = 0; m < kMasks; ++m)
    if (full_[kMaskArguments[m]].defined())
      bind_mask(kMaskArguments[m], kernel, args.grad_masks[m]);
}

void GradientTensors::bind_mask(Argument argument, KernelCall& kernel, GradMask& grad) const {
  const at::Tensor& full = full_[argument];
  const MaskSum sum = sums_[argument];
  if (sum == MaskSum::none) return kernel.bind(grad.each, full, Shape::mask);
  if (sum == MaskSum::queries) return kernel.bind(grad.queries, full, Shape::row);
  kernel.bind(grad.keys, full, Shape::row);
  std::swap(grad.keys.strides.row, grad.keys.strides.col);
}

void GradientTensors::zero() const {
  for (const at::Tensor& full : full_)
    if (full.defined()) full.zero_();
}

void GradientTensors::zero_gaps() const {
  if (!sizes_.packed) return;
  const auto zero = [&](Argument argument) {
    if (full_[argument].defined()) full_[argument].zero_();
  };
  for (const Argument argument : kHeadArguments) zero(argument);
  if (full_[arg::query].defined())
    for_each_gap(documents_, sizes_.seqlen_q, [&](int64_t begin, int64_t end) {
      full_[arg::query].slice(0, begin, end).zero_();
    });
  if (!documents_.covers_keys) zero(arg::key), zero(arg::value);
}

// Of a mask that broadcasts over queries or keys, for each document: the sums over what it has only
// one of, from the sums of each key or query, [H, Tk] or [H, T].
at::Tensor GradientTensors::sum_of_documents(Argument argument) const {
  const at::Tensor& mask = call_[argument];
  const at::Tensor sum = at::zeros(mask.sizes(), mask.options().dtype(at::kDouble));
  const at::Tensor rows = full_[argument].to(at::kDouble);
  const auto step = [&](int64_t i) { return stride_from_right(sum, i); };
  const bool of_keys = sums_[argument] == MaskSum::keys;
  const int64_t row_step = step(of_keys ? 0 : 1);
  for (size_t n = 0; n < documents_.all.size(); ++n) {
    const Span& span = documents_.all[n];
    if (span.seqlen_q == 0) continue;  // nothing was computed for it
    const int64_t begin = of_keys ? span.key_begin : span.query_begin;
    const int64_t count = of_keys ? span.seqlen_k : span.seqlen_q;
    for (int64_t h = 0; h < sizes_.heads; ++h) {
      const double* from = rows.const_data_ptr<double>() + h * rows.stride(0) + begin;
      double* const to = sum.mutable_data_ptr<double>() + int64_t(n) * step(3) + h * step(2);
      for (int64_t i = 0; i < count; ++i) to[i * row_step] += from[i];
    }
  }
  return sum;
}

at::Tensor GradientTensors::reduced(Argument argument) const {
  const at::Tensor& tensor = call_[argument];
  at::Tensor sum = full_[argument];
  if (!sum.defined()) return sum;
  // The sums of a mask that one dimension shares are laid out as the log-sum-exp is.
  const MaskSum summed = sums_[argument];
  const bool own_layout = summed == MaskSum::none;
  if (!own_layout && sizes_.packed)
    return empty_gradient<int64_t>(tensor).copy_(sum_of_documents(argument));
  if (!own_layout) sum = sum.unsqueeze(summed == MaskSum::keys ? -2 : -1);
  const bool lies_like_tensor = argument != arg::score_tables || tensor.is_contiguous();
  if (own_layout && lies_like_tensor && sum.sizes() == tensor.sizes() &&
      sum.scalar_type() == tensor.scalar_type())
    return sum;
  if (argument == arg::key || argument == arg::value) {
    const int64_t head = sizes_.packed ? 1 : 2;
    const int64_t own = size_from_right<int64_t>(tensor, head),
                  heads = size_from_right<int64_t>(sum, head);
    if (own != heads && own != 0) sum = sum.unflatten(-1 - head, {own, heads / own}).sum(-1 - head);
  }
  sum = tensor.numel() == 1 ? sum_to_one(sum) : sum.sum_to_size(tensor.sizes());
  return empty_gradient<int64_t>(tensor).copy_(sum);
}

Tensors GradientTensors::results() const {
  Tensors results;
  for (const Argument argument : call_.op->results)
    results.push_back(argument < arg::kDifferentiable ? reduced(argument) : at::Tensor());
  return results;
}

}  // namespace qkv
