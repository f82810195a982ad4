#include "call/dtypes.h"
#include "ops/rotate/rotate.h"
#include "rotation.h"
#include "tensors/copies.h"
#include "tensors/layout.h"
#include "tensors/problem.h"

namespace qkv::ops {
namespace {

// What comes after the dimensions of the batch.
enum class Last { head_row_column, row_column, column };

template <class Tensor>
void bind(const Rotation& r, Tensor& to, const at::Tensor& tensor, Last last) {
  constexpr bool kIsInput = std::is_base_of_v<Input, Tensor>;
  if constexpr (kIsInput) {
    to.data = tensor.const_data_ptr();
  } else {
    to.data = tensor.mutable_data_ptr();
  }
  if constexpr (!std::is_same_v<Tensor, Input> && !std::is_same_v<Tensor, Output>)
    to.dtype = *dtype_of(tensor.scalar_type());
  int64_t dim = 0;
  to.strides.col = stride_from_right(tensor, dim++);
  if (last != Last::column) to.strides.row = stride_from_right(tensor, dim++);
  if (last == Last::head_row_column) to.strides.head = stride_from_right(tensor, dim++);
  for (int d = r.batch_rank; d-- > 0;) to.strides.batch[d] = stride_from_right(tensor, dim++);
}

constexpr Argument kTensors[] = {arg::query, arg::key}, kNorms[] = {arg::query_norm, arg::key_norm},
                   kIncoming[] = {arg::grad_rotated_query, arg::grad_rotated_key};

// A rotation of tensors like `query`, which it does not have yet.
Rotation rotation_of(const at::Tensor& query, const at::Tensor& cos, const at::Tensor& sin) {
  Rotation r;
  r.dtype = *dtype_of(query.scalar_type());
  r.batch_rank = int(query.dim()) - 3;
  std::copy_n(query.sizes().begin(), r.batch_rank, r.batch_sizes.begin());
  r.seqlen = query.size(-2), r.head_dim = query.size(-1);
  r.rotary_pairs = cos.size(-1);
  r.num_threads = num_threads();
  bind(r, r.cos, cos, Last::row_column);
  bind(r, r.sin, sin, Last::row_column);
  return r;
}

// The inputs of a call.
Rotation rotation_of(const Call& call) {
  Rotation r = rotation_of(call[arg::query], call[arg::cos], call[arg::sin]);
  r.is_interleaved = call.options.interleaved;
  r.eps = call.options.eps;
  for (int t = 0; t < 2; ++t) {
    r.tensors[t].heads = call[kTensors[t]].size(-3);
    bind(r, r.tensors[t].input, call[kTensors[t]], Last::head_row_column);
    if (call.has(kNorms[t])) bind(r, r.tensors[t].weight, call[kNorms[t]], Last::column);
  }
  return r;
}

}  // namespace

Tensors rotate_cpu(const Call& call) {
  check_rotation<int64_t>(call);
  if (!is_aligned(call)) return rotate_cpu(*CopiedCall(call, aligned));
  Rotation r = rotation_of(call);
  Tensors results;
  for (int t = 0; t < 2; ++t) {
    results.push_back(empty_gradient<int64_t>(call[kTensors[t]]));
    bind(r, r.tensors[t].output, results[t], Last::head_row_column);
  }
  // There may be any number of rows without columns or heads.
  if (results[0].numel() + results[1].numel() > 0) rotation_forward(r);
  return results;
}

Tensors rotate_backward_cpu(const Call& call) {
  check_rotation<int64_t>(call);
  if (!call.has_incoming()) return no_results(call);
  if (!is_aligned(call)) return rotate_backward_cpu(*CopiedCall(call, aligned));
  const Tensors results = rotation_gradients<int64_t>(call);
  Gradients gradients;
  for (size_t i = 0; i < results.size(); ++i) gradients[call.op->results[i]] = results[i];
  Rotation r = rotation_of(call);
  RotationGradients to;
  for (int t = 0; t < 2; ++t) {
    at::Tensor& gradient = gradients[kTensors[t]];
    if (call.has(kIncoming[t])) {
      // Where it is not wanted, it is made all the same.
      if (!gradient.defined()) gradient = empty_gradient<int64_t>(call[kTensors[t]]);
      bind(r, to.grad_output[t], call[kIncoming[t]], Last::head_row_column);
      bind(r, r.tensors[t].output, gradient, Last::head_row_column);
    } else {
      r.tensors[t].heads = 0;
      if (gradient.defined()) gradient.zero_();
    }
    if (gradients[kNorms[t]].defined())
      bind(r, to.grad_weight[t], gradients[kNorms[t]], Last::column);
  }
  if (gradients[arg::cos].defined()) bind(r, to.grad_cos, gradients[arg::cos], Last::row_column);
  if (gradients[arg::sin].defined()) bind(r, to.grad_sin, gradients[arg::sin], Last::row_column);
  if (call[arg::query].numel() + call[arg::key].numel() > 0) {
    rotation_backward(r, to);
  } else {
    for (const at::Tensor& empty_sum : results)
      if (empty_sum.defined()) empty_sum.zero_();
  }
  return results;
}

at::Tensor rotated_from(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                        bool interleaved, c10::ArrayRef<int64_t> offsets) {
  const at::Tensor from = aligned(x), cosines = aligned(cos), sines = aligned(sin);
  const at::Tensor result = empty_gradient<int64_t>(from);
  if (result.numel() == 0) return result;  // For which the tables need not have a row.
  Rotation r = rotation_of(from, cosines, sines);
  r.is_interleaved = interleaved;
  r.offsets = offsets.data();
  r.tensors[0].heads = from.size(-3);
  bind(r, r.tensors[0].input, from, Last::head_row_column);
  bind(r, r.tensors[0].output, result, Last::head_row_column);
  rotation_forward(r);
  return result;
}

}  // namespace qkv::ops
