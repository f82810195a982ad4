// qkv::rotate: rotary position embedding of query and key, and the norm before it.
#include "qkv/rotate.h"

#include "autograd/run.h"
#include "ops/rotate/rotate.h"
#include "tensors/layout.h"

namespace qkv {
namespace ops {
namespace {

using c10::SymInt;

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
  for (const auto& [grad, of] : {std::pair(arg::grad_rotated_query, arg::query),
                                 std::pair(arg::grad_rotated_key, arg::key)}) {
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

Tensors rotate_meta(const Call& call) {
  check_rotation<SymInt>(call);
  if (call.op->is_backward) return rotation_gradients<SymInt>(call);
  return {empty_gradient<SymInt>(call[arg::query]), empty_gradient<SymInt>(call[arg::key])};
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

template <class T>
Tensors rotation_gradients(const Call& call) {
  Tensors gradients = empty_gradients<T>(call);
  if (!call.has_incoming()) return gradients;
  const bool has_tables = call.output_mask[arg::cos] || call.output_mask[arg::sin];
  const std::tuple<size_t, Argument, Argument> both[] = {
      {0, arg::query_norm, arg::grad_rotated_query}, {1, arg::key_norm, arg::grad_rotated_key}};
  for (const auto& [t, norm, incoming] : both)
    if (gradients[t].defined() && call.has(incoming) && !call.has(norm) && !has_tables)
      gradients[t] = empty_gradient<T>(call[incoming]);
  return gradients;
}
template Tensors rotation_gradients<int64_t>(const Call&);

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
template void check_rotation<int64_t>(const Call&);

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
