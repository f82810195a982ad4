// qkv::rotate: rotary position embedding of query and key, and the norm before it.
#include "qkv/rotate.h"

#include <ATen/ATen.h>

#include "autograd/run.h"
#include "call/dtypes.h"
#include "ops/rotate/rotate.h"
#include "rotation.h"
#include "tensors/copies.h"
#include "tensors/layout.h"
#include "tensors/problem.h"

namespace qkv {
namespace ops {
namespace {

using c10::SymInt;

// What is rotated, and of each its norm, if any, and the gradient of what it becomes.
constexpr Argument kTensors[] = {arg::query, arg::key}, kNorms[] = {arg::query_norm, arg::key_norm},
                   kIncoming[] = {arg::grad_rotated_query, arg::grad_rotated_key};

// The dimensions of query without its heads, and `last` in place of its last ones.
template <class T>
typename Sizes<T>::Shape with_batch(const Call& call, std::initializer_list<T> last) {
  const auto query = sizes_of<T>(call[arg::query]);
  typename Sizes<T>::Shape shape(query.begin(), query.end() - 3);
  shape.append(last);
  return shape;
}

// That `tensor` has `same` last dimensions as it is `expected` to have, and others that broadcast.
template <class T>
void expect_broadcasts(const Call& call, Argument argument, const char* dims, int64_t same,
                       c10::ArrayRef<T> expected) {
  const auto sizes = sizes_of<T>(call[argument]);
  const auto last = [&](c10::ArrayRef<T> all) { return all.slice(all.size() - same); };
  const bool fits = int64_t(sizes.size()) >= same && are_equal(last(sizes), last(expected)) &&
                    expands_to(sizes, expected);
  expect_shape<T>(fits, call, argument, ", but ", dims, " = ", expected,
                  same == 1 ? " or its last dimension is expected"
                            : " or its last two dimensions are expected");
}

template <class T>
void check_shapes(const Call& call) {
  const auto query = sizes_of<T>(call[arg::query]), key = sizes_of<T>(call[arg::key]);
  const int64_t rank = query.size();
  expect_shape<T>(rank >= 3 && rank <= kMaxBatchRank + 3, call, arg::query, ", but 3 to ",
                  kMaxBatchRank + 3, " dimensions are expected: [..., H, L, D]");
  const auto expected = with_batch<T>(
      call, {size_from_right<T>(call[arg::key], 2), query[rank - 2], query[rank - 1]});
  expect_shape<T>(are_equal<T>(key, expected), call, arg::key, ", but query's is expected, ", query,
                  ", with any number of heads");
  const T &L = query[rank - 2], &D = query[rank - 1];
  const T pairs = size_from_right<T>(call[arg::cos], 0);
  expect_broadcasts<T>(call, arg::cos, "[..., L, R / 2]", 2, with_batch<T>(call, {L, pairs}));
  expect_shape<T>(!is_true(is_above(T(2 * pairs), D)), call, arg::cos,
                  ", but no more than D / 2 pairs are expected, of D = ", D,
                  " numbers; a table that has each number twice is given as cos[..., :R // 2]");
  expect_shape<T>(are_equal(sizes_of<T>(call[arg::sin]), sizes_of<T>(call[arg::cos])), call,
                  arg::sin, ", but that of cos is expected, ", sizes_of<T>(call[arg::cos]));
  for (const Argument weight : {arg::query_norm, arg::key_norm})
    if (call.has(weight))
      expect_broadcasts<T>(call, weight, "[..., D]", 1, with_batch<T>(call, {D}));
}

// Of the backward operator.
template <class T>
void check_incoming(const Call& call) {
  for (int t = 0; t < 2; ++t) {
    const Argument grad = kIncoming[t], of = kTensors[t];
    if (!call.has(grad)) continue;
    expect_sizes(call, grad, "", sizes_of<T>(call[of]));
    expect_dtype(call[grad].scalar_type() == call[of].scalar_type(), call, grad, ", but ",
                 name(call[of].scalar_type()), " is expected");
  }
}

// The backward pass of a rotation alone is linear, and so knows nothing of what was rotated.
bool reads(const Call& call, Argument argument) {
  if (argument != arg::query && argument != arg::key) return true;
  const bool has_norm = call.has(argument == arg::query ? arg::query_norm : arg::key_norm);
  return has_norm || call[arg::cos].requires_grad() || call[arg::sin].requires_grad();
}

// Throws c10::Error for a call that cannot be computed.
template <class T>
void check_rotation(const Call& call) {
  check_tensors(call);
  check_supported(call);
  const double eps = call.options.eps;
  TORCH_CHECK_VALUE(eps >= 0 && is_finite_for(call[arg::query].scalar_type(), eps), call.title(),
                    ": eps is ", eps, ", but ", finite_for(call[arg::query].scalar_type()),
                    " that is not negative is expected");
  check_shapes<T>(call);
  if (call.op->is_backward) check_incoming<T>(call);
}

// What the backward operator returns, to be filled; undefined: not wanted. The gradient of what was
// rotated without a norm lies in memory like the incoming one: a Node keeps its shape alone.
template <class T>
Tensors rotation_gradients(const Call& call) {
  Tensors gradients = empty_gradients<T>(call);
  if (!call.has_incoming()) return gradients;
  const bool has_tables = call.output_mask[arg::cos] || call.output_mask[arg::sin];
  for (int t = 0; t < 2; ++t)
    if (gradients[t].defined() && call.has(kIncoming[t]) && !call.has(kNorms[t]) && !has_tables)
      gradients[t] = empty_gradient<T>(call[kIncoming[t]]);
  return gradients;
}

Tensors rotate_meta(const Call& call) {
  check_rotation<SymInt>(call);
  if (call.op->is_backward) return rotation_gradients<SymInt>(call);
  return {empty_gradient<SymInt>(call[arg::query]), empty_gradient<SymInt>(call[arg::key])};
}

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

Tensors rotate_cpu(const Call& call) {
  check_rotation<int64_t>(call);
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

at::Tensor normalised(const at::Tensor& x, const at::Tensor& weight, double eps) {
  if (!weight.defined()) return x;
  const at::Tensor norm = (x * x).mean(-1, /*keepdim=*/true).add(eps).rsqrt();
  return x * norm * weight.to(x.scalar_type()).unsqueeze(-2).unsqueeze(-2);
}

at::Tensor rotated(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                   bool interleaved) {
  const c10::SymInt pairs = cos.sym_size(-1);
  const at::Tensor first = x.slice_symint(-1, 0, 2 * pairs);
  const auto of_pairs = [&](int64_t which) {
    if (interleaved) return first.slice_symint(-1, which, 2 * pairs, 2);
    return first.slice_symint(-1, which * pairs, (which + 1) * pairs);
  };
  const at::Tensor a = of_pairs(0), b = of_pairs(1);
  const at::Tensor left = a * cos - b * sin, right = b * cos + a * sin;
  const at::Tensor turned =
      interleaved ? at::stack({left, right}, -1).flatten(-2) : at::cat({left, right}, -1);
  return at::cat({turned, x.slice_symint(-1, 2 * pairs)}, -1);
}

// What rotate returns, out of torch's operators: for derivatives beyond the first.
Tensors rotate_composition(const Call& call) {
  const at::ScalarType dtype = call[arg::query].scalar_type(), wide = compute_type(dtype);
  const at::Tensor cos = call[arg::cos].to(wide).unsqueeze(-3);
  const at::Tensor sin = call[arg::sin].to(wide).unsqueeze(-3);
  Tensors results;
  for (int t = 0; t < 2; ++t) {
    const at::Tensor x = normalised(call[kTensors[t]].to(wide), call[kNorms[t]], call.options.eps);
    results.push_back(rotated(x, cos, sin, call.options.interleaved).to(dtype));
  }
  return results;
}

DefinedOperator rotate("rotate",
                       "rotate(query, key, cos, sin, *, query_weight?= as query_norm, "
                       "key_weight?= as key_norm, eps, interleaved=) -> rotated_query, rotated_key",
                       {.cpu = &rotate_cpu,
                        .meta = &rotate_meta,
                        .composition = &rotate_composition,
                        .reads = &reads});
DefinedOperator rotate_backward(rotate, "rotate_backward(grad_rotated_query?, grad_rotated_key?; )",
                                {.cpu = &rotate_backward_cpu, .meta = &rotate_meta});

}  // namespace

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

}  // namespace ops

std::tuple<at::Tensor, at::Tensor> rotate(const at::Tensor& query, const at::Tensor& key,
                                          const at::Tensor& cos, const at::Tensor& sin,
                                          const RotateOptions& options) {
  Call call(ops::rotate);
  call.set(arg::query, query), call.set(arg::key, key);
  call.set(arg::cos, cos), call.set(arg::sin, sin);
  call.set(arg::query_norm, tensor_of(options.query_weight()));
  call.set(arg::key_norm, tensor_of(options.key_weight()));
  call.options.eps = options.eps(), call.options.interleaved = options.interleaved();
  return pair_of(run(call));
}

}  // namespace qkv
