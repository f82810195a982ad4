// Dispatch key CPU: the kernel library's forward and backward.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>

#include "layout.h"
#include "problem.h"

namespace qkv {
namespace {

bool nothing_to_do(const Problem& p) {
  return p.batch() == 0 || p.heads == 0 || p.seqlen_q == 0 || p.seqlen_k == 0;
}

// The kernels read whole elements. Tensors on foreign memory, from frombuffer,
// may begin between two: those are copied.
bool is_aligned(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % tensor.element_size() == 0;
}
bool is_aligned(const OptionalTensor& tensor) { return !tensor || is_aligned(*tensor); }
bool is_aligned(const Forward& call) {
  return is_aligned(call.query) && is_aligned(call.key) && is_aligned(call.value) &&
         is_aligned(call.options.attn_mask());
}

at::Tensor aligned(const at::Tensor& tensor) {
  return is_aligned(tensor) ? tensor : tensor.clone();
}
OptionalTensor aligned(const OptionalTensor& tensor) {
  return tensor ? OptionalTensor(aligned(*tensor)) : std::nullopt;
}
AttentionOptions aligned(const AttentionOptions& options) {
  return AttentionOptions(options).attn_mask(aligned(options.attn_mask()));
}

OutputAndLse forward_cpu(const Forward& call) {
  const auto sizes = check<int64_t>(call);
  if (!is_aligned(call)) {
    return forward_cpu(
        {aligned(call.query), aligned(call.key), aligned(call.value), aligned(call.options)});
  }
  auto [output, lse] = empty_results(call, sizes);
  Problem problem = problem_of(call, sizes);
  ForwardResult result{{output.mutable_data_ptr(), {}}, {lse.mutable_data_ptr(), {}}};
  auto operands = operands_of(call, problem);
  operands.push_back({&output, &result.output.strides});
  operands.push_back({&lse, &result.lse.strides, false});
  set_strides(problem, sizes, operands);
  if (nothing_to_do(problem)) {
    output.zero_();
    lse.fill_(-std::numeric_limits<double>::infinity());
  } else {
    attention_forward(problem, result);
  }
  return {std::move(output), std::move(lse)};
}

// A gradient as the kernel writes it, for every head and batch item of the
// call; reduced to the tensor's own shape where that is broadcast.
class Gradient {
 public:
  // `heads` of the Problem for this tensor; `repeat` of them share one of the tensor's.
  Gradient(bool wanted, const at::Tensor& tensor, const Sizes<int64_t>& sizes, int64_t heads)
      : tensor_(tensor), heads_(heads) {
    if (!wanted) return;
    c10::SmallVector<int64_t, 6> shape(sizes.batch.begin(), sizes.batch.end());
    if (sizes.has_heads) shape.push_back(heads);
    shape.append({tensor.size(-2), tensor.size(-1)});
    broadcast_ = tensor.sizes() != c10::ArrayRef<int64_t>(shape);
    full_ = broadcast_ ? at::empty(shape, tensor.options()) : empty_gradient<int64_t>(tensor);
  }

  const at::Tensor& full() const { return full_; }
  void* data() const { return full_.defined() ? full_.mutable_data_ptr() : nullptr; }

  at::Tensor reduced() const {
    if (!full_.defined() || !broadcast_) return full_;
    at::Tensor sum = full_;
    const int64_t own_heads = tensor_.dim() > 2 ? tensor_.size(-3) : 1;
    if (own_heads != heads_ && own_heads != 0)
      sum = sum.unflatten(-3, {own_heads, heads_ / own_heads}).sum(-3);
    return empty_gradient<int64_t>(tensor_).copy_(sum.sum_to_size(tensor_.sizes()));
  }

 private:
  const at::Tensor& tensor_;
  int64_t heads_;
  bool broadcast_ = false;
  at::Tensor full_;
};

Gradients backward_cpu(const Backward& call) {
  const Forward& f = call.forward;
  const auto sizes = check<int64_t>(call);
  if (!call.grad_output && !call.grad_lse) return {};
  if (!is_aligned(f) || !is_aligned(call.grad_output) || !is_aligned(call.grad_lse) ||
      !is_aligned(call.output) || !is_aligned(call.lse)) {
    return backward_cpu({aligned(call.grad_output),
                         aligned(call.grad_lse),
                         {aligned(f.query), aligned(f.key), aligned(f.value), aligned(f.options)},
                         aligned(call.output),
                         aligned(call.lse),
                         call.output_mask});
  }
  Problem p = problem_of(f, sizes);
  const Gradient query(call.output_mask[0], f.query, sizes, p.heads);
  const Gradient key(call.output_mask[1], f.key, sizes, p.kv_heads);
  const Gradient value(call.output_mask[2], f.value, sizes, p.kv_heads);

  BackwardArgs args;
  auto operands = operands_of(f, p);
  const auto input = [&](Input& input, const at::Tensor& tensor, bool has_columns) {
    input.data = tensor.const_data_ptr();
    operands.push_back({&tensor, &input.strides, has_columns});
  };
  const auto output = [&](Output& output, const Gradient& gradient) {
    output.data = gradient.data();
    if (output.data) operands.push_back({&gradient.full(), &output.strides});
  };
  input(args.output, call.output, true);
  input(args.lse, call.lse, false);
  if (call.grad_output) input(args.grad_output, *call.grad_output, true);
  if (call.grad_lse) input(args.grad_lse, *call.grad_lse, false);
  output(args.grad_query, query);
  output(args.grad_key, key);
  output(args.grad_value, value);
  set_strides(p, sizes, operands);

  if (nothing_to_do(p)) {
    for (const Gradient* g : {&query, &key, &value})
      if (g->data()) g->full().zero_();
  } else {
    attention_backward(p, args);
  }
  return {query.reduced(), key.reduced(), value.reduced()};
}

}  // namespace

TORCH_LIBRARY_IMPL(qkv, CPU, m) {
  m.impl("attention_with_lse", ops::forward<&forward_cpu>);
  m.impl("attention_backward", ops::backward<&backward_cpu>);
}

}  // namespace qkv
