#include "check.h"

#include <c10/core/ScalarType.h>
#include <c10/core/SymInt.h>

#include <cmath>

namespace qkv {
namespace {

std::string_view name(at::ScalarType dtype) { return c10::getDtypeNames(dtype).first; }

// The size of a dimension counted from the right: 0 is the last one.
template <class T>
T size_from_right(const at::Tensor& tensor, int64_t i) {
  return i < tensor.dim() ? sizes_of<T>(tensor)[tensor.dim() - 1 - i] : T(1);
}

void check_tensor(const char* argument, const at::Tensor& tensor, const at::Tensor& query) {
  TORCH_CHECK(tensor.defined(), "attention: ", argument, " is an undefined tensor");
  TORCH_CHECK(!tensor.is_nested(), "attention: ", argument,
              " is a nested tensor, but dense tensors are expected; pad it and mask the padding");
  TORCH_CHECK(tensor.layout() == at::kStrided, "attention: ", argument, " has the layout ",
              tensor.layout(), ", but a dense (strided) tensor is expected");
  TORCH_CHECK(!tensor.is_quantized(), "attention: ", argument,
              " is quantized, but float32 or float64 is expected; dequantize() it");
  TORCH_CHECK(tensor.device() == query.device(), "attention: ", argument, " is on ",
              tensor.device(), ", but query is on ", query.device());
}

template <class T>
void check_rank(const char* argument, const at::Tensor& tensor, const char* expected) {
  TORCH_CHECK(tensor.dim() >= 2, "attention: ", argument, " has the shape ", sizes_of<T>(tensor),
              ", but at least 2 dimensions are expected: ", expected);
}

void check_dtypes(const Forward& call) {
  const at::ScalarType dtype = call.query.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(dtype != at::kHalf && dtype != at::kBFloat16, "attention: query is ",
                              name(dtype),
                              ", which is not supported yet; expected float32 or float64");
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kDouble, "attention: query is ", name(dtype),
              ", but float32 or float64 is expected");
  TORCH_CHECK(call.key.scalar_type() == dtype, "attention: key is ", name(call.key.scalar_type()),
              ", but query is ", name(dtype));
  TORCH_CHECK(call.value.scalar_type() == dtype, "attention: value is ",
              name(call.value.scalar_type()), ", but query is ", name(dtype));
}

void check_options(const AttentionOptions& options) {
  const double p = options.dropout_p();
  TORCH_CHECK_VALUE(p >= 0 && p <= 1, "attention: dropout_p is ", p,
                    ", but a probability between 0 and 1 is expected");
  TORCH_CHECK_NOT_IMPLEMENTED(p == 0, "attention: dropout_p is ", p,
                              ", but dropout is not implemented yet; pass 0");
  TORCH_CHECK_VALUE(!options.scale() || std::isfinite(*options.scale()), "attention: scale is ",
                    options.scale().value_or(0), ", but a finite number is expected");
}

template <class T>
void check_heads(const Forward& call, Sizes<T>& sizes) {
  const T query = size_from_right<T>(call.query, 2);
  const T& key = sizes.key_heads = size_from_right<T>(call.key, 2);
  const T& value = sizes.value_heads = size_from_right<T>(call.value, 2);
  sizes.heads = query;
  if (call.options.enable_gqa()) {
    const auto divides = [&](const T& heads) {
      return heads == 0 ? query == 0 : query % heads == 0;
    };
    TORCH_CHECK(divides(key), "attention: key has ", key, " heads and query ", query,
                ", but with enable_gqa the heads of key must divide those of query");
    TORCH_CHECK(divides(value), "attention: value has ", value, " heads and query ", query,
                ", but with enable_gqa the heads of value must divide those of query");
    return;
  }
  if (sizes.heads == 1) sizes.heads = key;
  if (sizes.heads == 1) sizes.heads = value;
  TORCH_CHECK(key == 1 || key == sizes.heads, "attention: key has ", key, " heads and query ",
              query, ", but they must be equal, or one of them 1, without enable_gqa");
  TORCH_CHECK(value == 1 || value == sizes.heads, "attention: value has ", value,
              " heads, but query and key have ", sizes.heads,
              "; they must be equal, or one of them 1, without enable_gqa");
}

template <class T>
void check_batch(const Forward& call, Sizes<T>& sizes) {
  const int64_t rank = std::max({call.query.dim(), call.key.dim(), call.value.dim()});
  sizes.has_heads = rank > 2;
  if (rank <= 3) return;
  sizes.batch.resize(rank - 3, T(1));
  for (int64_t i = 3; i < rank; ++i) {
    T& size = sizes.batch[rank - 1 - i];
    for (const at::Tensor* tensor : {&call.query, &call.key, &call.value}) {
      const T n = size_from_right<T>(*tensor, i);
      if (size == 1) size = n;
      TORCH_CHECK(n == 1 || n == size, "attention: the leading dimensions of query ",
                  sizes_of<T>(call.query), ", key ", sizes_of<T>(call.key), " and value ",
                  sizes_of<T>(call.value), " do not broadcast: dimension ", -1 - i,
                  " must be equal or 1");
    }
  }
}

template <class T>
void check_mask(const Forward& call, const Sizes<T>& sizes) {
  if (!call.options.attn_mask()) return;
  const at::Tensor& mask = *call.options.attn_mask();
  const at::ScalarType dtype = mask.scalar_type();
  TORCH_CHECK(dtype == at::kBool || dtype == at::kFloat || dtype == call.query.scalar_type(),
              "attention: attn_mask is ", name(dtype), ", but bool, float32 or query's dtype (",
              name(call.query.scalar_type()), ") is expected");
  const auto scores = sizes.scores();
  const int64_t rank = scores.size();
  bool fits = mask.dim() <= rank;
  for (int64_t i = 0; fits && i < mask.dim(); ++i) {
    const T n = size_from_right<T>(mask, i);
    fits = n == 1 || n == scores[rank - 1 - i];
  }
  TORCH_CHECK(fits, "attention: attn_mask has the shape ", sizes_of<T>(mask),
              ", which does not broadcast to [..., H, L, S] = ", c10::ArrayRef<T>(scores));
}

// The kernels count rows, keys, products and bytes in int64_t. Symbolic sizes
// are checked when they are known.
template <class T>
void check_overflow(const Sizes<T>& sizes) {
  int64_t bytes = sizeof(double);
  bool overflow = false;
  const auto multiply = [&](const T& size) {
    const std::optional<int64_t> n = c10::SymInt(size).maybe_as_int();
    if (n && *n > 1) overflow |= __builtin_mul_overflow(bytes, *n, &bytes);
  };
  for (const T& size : sizes.batch) multiply(size);
  for (const T* size : {&sizes.heads, &sizes.seqlen_q, &sizes.seqlen_k}) multiply(*size);
  const int64_t scores = bytes;
  multiply(sizes.head_dim);
  bytes = scores;
  multiply(sizes.head_dim_v);
  TORCH_CHECK(
      !overflow, "attention: query, key and value are too large: the bytes of B * H * L * ",
      "S * D numbers overflow int64, for [..., H, L, S] = ", c10::ArrayRef<T>(sizes.scores()),
      ", D = ", sizes.head_dim, " and Dv = ", sizes.head_dim_v);
}

template <class T>
void check_same_shape(const char* argument, const at::Tensor& tensor, c10::ArrayRef<T> expected,
                      at::ScalarType dtype) {
  TORCH_CHECK(sizes_of<T>(tensor) == expected, "attention_backward: ", argument, " has the shape ",
              sizes_of<T>(tensor), ", but ", expected, " is expected");
  TORCH_CHECK(tensor.scalar_type() == dtype, "attention_backward: ", argument, " is ",
              name(tensor.scalar_type()), ", but ", name(dtype), " is expected");
}

}  // namespace

void check_tensors(const Forward& call) {
  check_tensor("query", call.query, call.query);
  check_tensor("key", call.key, call.query);
  check_tensor("value", call.value, call.query);
  if (call.options.attn_mask()) check_tensor("attn_mask", *call.options.attn_mask(), call.query);
}

void check_tensors(const Backward& call) {
  const at::Tensor& query = call.forward.query;
  check_tensors(call.forward);
  check_tensor("output", call.output, query);
  check_tensor("logsumexp", call.lse, query);
  if (call.grad_output) check_tensor("grad_output", *call.grad_output, query);
  if (call.grad_lse) check_tensor("grad_logsumexp", *call.grad_lse, query);
}

void check_supported(const Forward& call) {
  const at::Device device = call.query.device();
  TORCH_CHECK_NOT_IMPLEMENTED(device.is_cpu() || device.is_meta(), "attention: query is on ",
                              device, ", but attention with logsumexp runs on the CPU");
  check_dtypes(call);
  check_options(call.options);
}

template <class T>
Sizes<T> check(const Forward& call) {
  check_tensors(call);
  check_supported(call);
  check_rank<T>("query", call.query, "[..., H, L, D]");
  check_rank<T>("key", call.key, "[..., H, S, D]");
  check_rank<T>("value", call.value, "[..., H, S, Dv]");
  Sizes<T> sizes;
  sizes.seqlen_q = size_from_right<T>(call.query, 1);
  sizes.head_dim = size_from_right<T>(call.query, 0);
  sizes.seqlen_k = size_from_right<T>(call.key, 1);
  sizes.head_dim_v = size_from_right<T>(call.value, 0);
  const T key_dim = size_from_right<T>(call.key, 0);
  TORCH_CHECK(key_dim == sizes.head_dim, "attention: key has the shape ", sizes_of<T>(call.key),
              ", but its last dimension must be query's, ", sizes.head_dim);
  const T value_rows = size_from_right<T>(call.value, 1);
  TORCH_CHECK(value_rows == sizes.seqlen_k, "attention: value has the shape ",
              sizes_of<T>(call.value), ", but its second last dimension must be key's, ",
              sizes.seqlen_k);
  check_heads(call, sizes);
  check_batch(call, sizes);
  check_mask(call, sizes);
  check_overflow(sizes);
  return sizes;
}

template <class T>
Sizes<T> check(const Backward& call) {
  check_tensors(call);
  Sizes<T> sizes = check<T>(call.forward);
  const auto output = sizes.output();
  const auto lse = sizes.lse();
  const at::ScalarType dtype = call.forward.query.scalar_type();
  check_same_shape<T>("output", call.output, output, dtype);
  check_same_shape<T>("logsumexp", call.lse, lse, dtype);
  if (call.grad_output) check_same_shape<T>("grad_output", *call.grad_output, output, dtype);
  if (call.grad_lse) check_same_shape<T>("grad_logsumexp", *call.grad_lse, lse, dtype);
  return sizes;
}

template <class T>
c10::SmallVector<T, 6> Sizes<T>::shape(const T& rows, const T& columns) const {
  c10::SmallVector<T, 6> result(batch.begin(), batch.end());
  if (has_heads) result.push_back(heads);
  result.push_back(rows);
  result.push_back(columns);
  return result;
}

template <class T>
c10::SmallVector<T, 6> Sizes<T>::lse() const {
  auto result = output();
  result.pop_back();
  return result;
}

template struct Sizes<int64_t>;
template struct Sizes<c10::SymInt>;
template Sizes<int64_t> check(const Forward&);
template Sizes<c10::SymInt> check(const Forward&);
template Sizes<int64_t> check(const Backward&);
template Sizes<c10::SymInt> check(const Backward&);

}  // namespace qkv
