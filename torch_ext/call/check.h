// What every kernel of an operator checks first, so that the CPU and Meta
// kernels raise the same errors.
#pragma once

#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "call/call.h"

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

  Shape output() const { return tensor(heads, seqlen_q, head_dim_v); }  // [..., H, L, Dv]
  Shape lse() const;                                                    // [..., H, L]
  Shape scores() const;                                                 // [..., H, L, S]
  Shape weights(Reduce reduce) const;  // of attention_weights' result
  Shape per_head() const;  // [..., H] or, packed, [N, H]: of alibi_slopes and sinks, broadcast
  // How many things dropout tells apart by their number: batch items, or documents.
  T dropout_items() const;
  // Of a result, or what is given beside the results.
  Shape of(Argument argument, Reduce reduce) const;
  // Of a tensor like query, key and value.
  Shape tensor(const T& heads, const T& rows, const T& columns) const;
};

// Throws c10::Error for a call that cannot be computed. The values of index tensors are not looked
// at: see tensors/documents.h. Of a backward operator, that the results and gradients it is given
// fit, too.
template <class T>
Sizes<T> check(const Call& call);

// The same for an operator whose query, key and value have other shapes: check_sizes says which,
// and sets the sizes.
template <class T>
Sizes<T> check(const Call& call, void (*check_sizes)(const Call&, Sizes<T>&));

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
  if constexpr (std::is_same_v<T, int64_t>) {
    return tensor.sizes();
  } else {
    return tensor.sym_sizes();
  }
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

template <class T>
void expect_rank(const Call& call, Argument argument, int64_t rank, const char* dims) {
  expect_shape<T>(call[argument].dim() == rank, call, argument, ", but ", rank,
                  " dimensions are expected: ", dims);
}

template <class T>
c10::ArrayRef<T> strides_of(const at::Tensor& tensor) {
  if constexpr (std::is_same_v<T, int64_t>) {
    return tensor.strides();
  } else {
    return tensor.sym_strides();
  }
}

}  // namespace qkv
