#include "tensors/layout.h"

#include <ATen/EmptyTensor.h>

#include "tensors/large_memory.h"

namespace qkv {
namespace {

at::Tensor empty(c10::ArrayRef<int64_t> sizes, c10::ArrayRef<int64_t> strides,
                 at::ScalarType dtype) {
  return in_huge_pages(at::detail::empty_strided_cpu(sizes, strides, dtype));
}

at::Tensor empty(c10::ArrayRef<c10::SymInt> sizes, c10::ArrayRef<c10::SymInt> strides,
                 at::ScalarType dtype) {
  return at::detail::empty_strided_symint_meta(sizes, strides, dtype);
}

// Whether `outer` should be further in than `inner`. Zero strides do not say, and neither do those
// of which it is not known which one is larger.
template <class T>
bool wrong_order(c10::ArrayRef<T> sizes, c10::ArrayRef<T> strides, int64_t inner, int64_t outer) {
  const T &in = strides[inner], &out = strides[outer];
  if (is_true(equals(in, T(0))) || is_true(equals(out, T(0)))) return false;
  if (is_true(equals(in, out))) return is_true(is_above(sizes[inner], sizes[outer]));
  return is_true(is_above(in, out));
}

// Dense strides for `sizes`, their dimensions ordered as in `model`, which is
// matched from the right. The last `fixed` dimensions stay innermost.
template <class T>
typename Sizes<T>::Shape dense_strides(c10::ArrayRef<T> sizes, const at::Tensor& model,
                                       int64_t fixed) {
  const auto model_sizes = sizes_of<T>(model);
  const auto model_strides = at::symint::strides<T>(model);
  const int64_t rank = sizes.size(), missing = rank - model.dim();
  c10::SmallVector<int64_t, 6> order(rank);  // innermost first
  for (int64_t i = 0; i < rank; ++i) order[i] = rank - 1 - i;
  for (int64_t i = fixed + 1; i < rank - missing; ++i)  // insertion sort: stable
    for (int64_t j = i; j > fixed; --j) {
      if (!wrong_order(model_sizes, model_strides, order[j - 1] - missing, order[j] - missing))
        break;
      std::swap(order[j - 1], order[j]);
    }
  typename Sizes<T>::Shape strides(rank);
  T stride = 1;
  for (int64_t dim : order) {
    strides[dim] = stride;
    stride *= at_least_one(sizes[dim]);
  }
  return strides;
}

}  // namespace

template <class T>
at::Tensor empty_result(const Call& call, const Sizes<T>& sizes, Argument result) {
  const auto shape = sizes.result(result, call.options.reduce);
  const int64_t fixed = kArguments[result].shape == Shape::output ? 1 : shape.size();
  return empty(shape, dense_strides<T>(shape, call[arg::query], fixed), result_type(call, result));
}

template <class T>
Tensors empty_results(const Call& call, const Sizes<T>& sizes) {
  Tensors results;
  for (const Argument result : call.op->results) {
    const bool is_wanted = result != arg::logsumexp || call.wants_lse || call.is_packed();
    results.push_back(is_wanted ? empty_result(call, sizes, result) : at::Tensor());
  }
  return results;
}

template <class T>
at::Tensor empty_gradient(const at::Tensor& tensor) {
  const auto sizes = sizes_of<T>(tensor);
  return empty(sizes, dense_strides<T>(sizes, tensor, 0), tensor.scalar_type());
}

template <class T>
Tensors empty_gradients(const Call& call) {
  Tensors gradients = no_results(call);
  if (!call.has_incoming()) return gradients;
  for (size_t i = 0; i < gradients.size(); ++i)
    if (const Argument argument = call.op->results[i]; call.wants_gradient(argument))
      gradients[i] = empty_gradient<T>(call[argument]);
  return gradients;
}

Tensors empty_results_meta(const Call& call) {
  const auto sizes = check<c10::SymInt>(call);
  return call.op->is_backward ? empty_gradients<c10::SymInt>(call) : empty_results(call, sizes);
}

at::Tensor zero_gradient(const at::Tensor& tensor, at::ScalarType dtype) {
  return zeros(tensor.sizes(), dense_strides<int64_t>(tensor.sizes(), tensor, 0), dtype);
}

#define QKV_INSTANTIATE(T)                                                  \
  template at::Tensor empty_result(const Call&, const Sizes<T>&, Argument); \
  template Tensors empty_results(const Call&, const Sizes<T>&);             \
  template at::Tensor empty_gradient<T>(const at::Tensor&);                 \
  template Tensors empty_gradients<T>(const Call&);
QKV_INSTANTIATE(int64_t)
QKV_INSTANTIATE(c10::SymInt)

}  // namespace qkv
