// What every kernel of an operator checks first, so that the CPU and Meta
// kernels raise the same errors.
#pragma once

#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "call/call.h"
#include "call/unknown_sizes.h"

namespace qkv {

// The sizes of a valid call. T: int64_t, or SymInt in the Meta kernels.
//
// A tensor's dimensions are [batch..., head, row, column]; those that it lacks
// on the left have size 1. Heads and batch dimensions are broadcast. Packed:
// [row, head, column], but logsumexp is [head, row].
template <class T>
struct Sizes {
  using Shape = c10::SmallVector<T, 6>;  // numbers; the enum qkv::Shape says which ones

  bool packed = false;
  Shape batch;
  bool has_heads = false;  // false: query, key and value are all [row, column]
  T heads = 1;             // H
  T key_heads = 1;         // divide H
  T value_heads = 1;
  T seqlen_q = 0;    // L, packed T
  T seqlen_k = 0;    // S, packed Tk
  T head_dim = 0;    // D
  T head_dim_v = 0;  // Dv
  T documents = 0;   // packed: N
  // Each batch item has a number of keys of its own, up to seqlen_k: a cache.
  bool is_cache = false;

  // Of a tensor like query, key and value.
  Shape tensor(const T& heads, const T& rows, const T& columns) const {
    if (packed) return {rows, heads, columns};
    Shape shape = batch;
    if (has_heads) shape.push_back(heads);
    shape.append({rows, columns});
    return shape;
  }
  // [..., H, L, S] or, packed, [H, T, Tk].
  Shape scores() const {
    if (packed) return {heads, seqlen_q, seqlen_k};
    return tensor(heads, seqlen_q, seqlen_k);
  }
  Shape lse() const {  // [..., H, L]
    Shape shape = scores();
    shape.pop_back();
    return shape;
  }
  // Of attention_weights' result.
  Shape weights(Reduce reduce) const {
    if (reduce == Reduce::none) return scores();
    Shape shape = batch;
    if (has_heads && reduce == Reduce::queries) shape.push_back(heads);
    if (reduce == Reduce::heads) shape.push_back(seqlen_q);
    shape.push_back(seqlen_k);
    return shape;
  }
  // Of a result, or what is given beside the results.
  Shape result(Argument argument, Reduce reduce) const {
    const qkv::Shape shape = kArguments[argument].shape;
    if (shape == qkv::Shape::output) return tensor(heads, seqlen_q, head_dim_v);
    return shape == qkv::Shape::row ? lse() : weights(reduce);
  }
  // [..., H] or, packed, [N, H]: of a number for each head, broadcast.
  Shape per_head() const {
    if (packed) return {documents, heads};
    Shape shape = batch;
    shape.push_back(heads);
    return shape;
  }
  // How many things dropout tells apart by their number: batch items, or documents.
  T dropout_items() const {
    if (packed) return documents;
    T items = 1;
    for (const T& size : batch) items *= size;
    return items;
  }
};

// The sizes of query, key and value, heads and documents, of which it throws c10::Error if they do
// not fit together.
template <class T>
void check_dense(const Call& call, Sizes<T>& sizes);

// Throws c10::Error for a call that cannot be computed. The values of index tensors are not looked
// at: see tensors/documents.h. Of a backward operator, that the results and gradients it is given
// fit, too. Where query, key and value have other shapes, check_sizes says which, and sets the
// sizes.
template <class T>
Sizes<T> check(const Call& call, void (*check_sizes)(const Call&, Sizes<T>&) = &check_dense<T>);

// cu_seq_q, cu_seq_k and seqused_k, which set sizes.documents.
template <class T>
void check_documents(const Call& call, Sizes<T>& sizes);

// That masks have an element for every pair of the document, or batch item of a cache, number
// `item`, which has so many queries and keys.
void check_masks_cover(const Call& call, int64_t item, int64_t seqlen_q, int64_t seqlen_k);

// The parts of it that need no sizes. That no tensor is missing, and that all are dense and on one
// device, which is all that torch's own attention needs to be checked for:
void check_tensors(const Call& call);
// That the device, dtypes and options are valid, and implemented.
void check_supported(const Call& call);

// Whether x is finite in the kernels, which have options in float32 unless query is float64.
bool is_finite_for(at::ScalarType query, double x);
const char* finite_for(at::ScalarType query);  // how to say so

// "float32"
std::string_view name(at::ScalarType dtype);

// What is computed with, summed up in and logsumexp is in: float64 for float64, else float32.
inline at::ScalarType compute_type(at::ScalarType dtype) { return at::toOpMathType(dtype); }

// Of what an operator returns, or is given beside what another one returned: is_result.
inline at::ScalarType result_type(const Call& call, Argument argument) {
  const at::ScalarType query = call[arg::query].scalar_type();
  const Type type = kArguments[argument].type;
  return type == Type::query ? query : type == Type::compute ? compute_type(query) : at::kLong;
}

template <class T>
c10::ArrayRef<T> sizes_of(const at::Tensor& tensor) {
  return at::symint::sizes<T>(tensor);
}

// The size and the stride of a dimension counted from the right: 0 is the last one. A dimension
// that the tensor lacks has size 1, and one of size 1, which broadcasts, has stride 0.
template <class T>
T size_from_right(const at::Tensor& tensor, int64_t i) {
  return i < tensor.dim() ? sizes_of<T>(tensor)[tensor.dim() - 1 - i] : T(1);
}
inline int64_t stride_from_right(const at::Tensor& tensor, int64_t i) {
  const int64_t dim = tensor.dim() - 1 - i;
  return dim < 0 || tensor.sizes()[dim] == 1 ? 0 : tensor.strides()[dim];
}

// Throw c10::Error unless an argument fits; `words` say what is expected, after what it is.
template <class... Words>
void expect_dtype(bool fits, const Call& call, Argument argument, const Words&... words) {
  TORCH_CHECK(fits, call.title(), ": ", call.name_of(argument), " is ",
              name(call[argument].scalar_type()), words...);
}
template <class T, class... Words>
void expect_shape(bool fits, const Call& call, Argument argument, const Words&... words) {
  TORCH_CHECK(fits, call.title(), ": ", call.name_of(argument), " has the shape ",
              sizes_of<T>(call[argument]), words...);
}

// `dims`: the names of the dimensions, "[B, H]", or "".
template <class T>
void expect_sizes(const Call& call, Argument argument, const char* dims,
                  c10::ArrayRef<T> expected) {
  expect_shape<T>(are_equal(sizes_of<T>(call[argument]), expected), call, argument, ", but ", dims,
                  *dims ? " = " : "", expected, " is expected");
}

template <class T>
void expect_rank(const Call& call, Argument argument, int64_t rank, const char* dims) {
  expect_shape<T>(call[argument].dim() == rank, call, argument, ", but ", rank,
                  " dimensions are expected: ", dims);
}

}  // namespace qkv
