// The sizes of a call, and that they fit together.
#include <c10/core/SymInt.h>

#include "check.h"

namespace qkv {
namespace {

// The size of a dimension counted from the right: 0 is the last one.
template <class T>
T size_from_right(const at::Tensor& tensor, int64_t i) {
  return i < tensor.dim() ? sizes_of<T>(tensor)[tensor.dim() - 1 - i] : T(1);
}

// Whether `tensor` can be expanded to `shape`.
template <class T>
bool broadcasts(const at::Tensor& tensor, c10::ArrayRef<T> shape) {
  const int64_t rank = shape.size();
  if (tensor.dim() > rank) return false;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    const T n = size_from_right<T>(tensor, i);
    if (n != 1 && n != shape[rank - 1 - i]) return false;
  }
  return true;
}

template <class T>
void check_rank(const Forward& call, Argument argument, const char* expected,
                const char* expected_packed) {
  const at::Tensor& tensor = call[argument];
  if (call.is_packed()) {
    TORCH_CHECK(tensor.dim() == 3, call.op, ": ", call.name_of(argument), " has the shape ",
                sizes_of<T>(tensor), ", but 3 dimensions are expected: ", expected_packed);
  } else {
    TORCH_CHECK(tensor.dim() >= 2, call.op, ": ", call.name_of(argument), " has the shape ",
                sizes_of<T>(tensor), ", but at least 2 dimensions are expected: ", expected);
  }
}

// L, S, D, Dv.
template <class T>
void check_rows(const Forward& call, Sizes<T>& sizes) {
  const bool packed = call.is_packed();
  const int64_t row = packed ? 2 : 1;
  check_rank<T>(call, kQuery, "[..., H, L, D]", "[T, H, D]");
  check_rank<T>(call, kKey, "[..., H, S, D]", "[Tk, H, D]");
  sizes.packed = packed;
  sizes.seqlen_q = size_from_right<T>(call.query(), row);
  sizes.head_dim = size_from_right<T>(call.query(), 0);
  sizes.seqlen_k = size_from_right<T>(call.key(), row);
  const T key_dim = size_from_right<T>(call.key(), 0);
  TORCH_CHECK(key_dim == sizes.head_dim, call.op, ": key has the shape ", sizes_of<T>(call.key()),
              ", but its last dimension must be query's, ", sizes.head_dim);
  if (!call.has_value) return;
  check_rank<T>(call, kValue, "[..., H, S, Dv]", "[Tk, H, Dv]");
  sizes.head_dim_v = size_from_right<T>(call.value(), 0);
  const T value_rows = size_from_right<T>(call.value(), row);
  TORCH_CHECK(value_rows == sizes.seqlen_k, call.op, ": value has the shape ",
              sizes_of<T>(call.value()), ", but its ", packed ? "first" : "second last",
              " dimension must be key's, ", sizes.seqlen_k);
}

template <class T>
void check_heads(const Forward& call, Sizes<T>& sizes) {
  const int64_t head = call.is_packed() ? 1 : 2;
  const T query = size_from_right<T>(call.query(), head);
  const T& key = sizes.key_heads = size_from_right<T>(call.key(), head);
  const T& value = sizes.value_heads =
      call.has_value ? size_from_right<T>(call.value(), head) : T(key);
  sizes.heads = query;
  if (call.options.enable_gqa) {
    const auto divides = [&](const T& heads) {
      return heads == 0 ? query == 0 : query % heads == 0;
    };
    TORCH_CHECK(divides(key), call.op, ": key has ", key, " heads and query ", query,
                ", but with enable_gqa the heads of key must divide those of query");
    TORCH_CHECK(divides(value), call.op, ": value has ", value, " heads and query ", query,
                ", but with enable_gqa the heads of value must divide those of query");
    return;
  }
  if (sizes.heads == 1) sizes.heads = key;
  if (sizes.heads == 1) sizes.heads = value;
  TORCH_CHECK(key == 1 || key == sizes.heads, call.op, ": key has ", key, " heads and query ",
              query, ", but they must be equal, or one of them 1, without enable_gqa");
  TORCH_CHECK(value == 1 || value == sizes.heads, call.op, ": value has ", value,
              " heads, but query and key have ", sizes.heads,
              "; they must be equal, or one of them 1, without enable_gqa");
}

template <class T>
void check_batch(const Forward& call, Sizes<T>& sizes) {
  const c10::ArrayRef<const at::Tensor*> tensors(call.tensors.data(), call.has_value ? 3 : 2);
  int64_t rank = 0;
  for (const at::Tensor* tensor : tensors) rank = std::max(rank, tensor->dim());
  sizes.has_heads = rank > 2;
  if (rank <= 3) return;
  sizes.batch.resize(rank - 3, T(1));
  for (int64_t i = 3; i < rank; ++i) {
    T& size = sizes.batch[rank - 1 - i];
    for (const at::Tensor* tensor : tensors) {
      const T n = size_from_right<T>(*tensor, i);
      if (size == 1) size = n;
      TORCH_CHECK(n == 1 || n == size, call.op, ": the leading dimensions of query ",
                  sizes_of<T>(call.query()), ", key ", sizes_of<T>(call.key()),
                  call.has_value ? " and value " : "",
                  call.has_value ? sizes_of<T>(call.value()) : c10::ArrayRef<T>(),
                  " do not broadcast: dimension ", -1 - i, " must be equal or 1");
    }
  }
}

}  // namespace

template <class T>
void check_option_sizes(const Forward& call, const Sizes<T>& sizes) {
  if (call.attn_mask().defined()) {
    const auto scores = sizes.scores();
    TORCH_CHECK(broadcasts<T>(call.attn_mask(), scores), call.op, ": attn_mask has the shape ",
                sizes_of<T>(call.attn_mask()),
                ", which does not broadcast to [..., H, L, S] = ", c10::ArrayRef<T>(scores));
  }
  for (const Argument argument : {kAlibiSlopes, kSinks}) {
    if (!call[argument].defined()) continue;
    const auto expected = sizes.per_head();
    TORCH_CHECK(broadcasts<T>(call[argument], expected), call.op, ": ", call.name_of(argument),
                " has the shape ", sizes_of<T>(call[argument]), ", which does not broadcast to ",
                sizes.packed ? "[N, H] = " : "[..., H] = ", c10::ArrayRef<T>(expected));
  }
  if (call.options.dropout_p > 0) {
    const auto seed = sizes_of<T>(call[kDropoutSeed]);
    TORCH_CHECK(seed[0] == 1, call.op, ": dropout_seed has the shape ", seed,
                ", but [1] is expected");
  }
}

template <class T>
void check_documents(const Forward& call, Sizes<T>& sizes) {
  if (!call.is_packed()) return;
  const T ends = sizes_of<T>(call[kCuSeqQ])[0];
  TORCH_CHECK(ends >= 1, call.op, ": cu_seq_q has the shape ", sizes_of<T>(call[kCuSeqQ]),
              ", but [N + 1] is expected for N documents");
  sizes.documents = ends - 1;
  if (call[kCuSeqK].defined()) {
    const auto shape = sizes_of<T>(call[kCuSeqK]);
    TORCH_CHECK(shape[0] == ends, call.op, ": cu_seq_k has the shape ", shape,
                ", but cu_seq_q's is expected, [", ends, "]");
  }
  if (call[kSequsedK].defined()) {
    const auto shape = sizes_of<T>(call[kSequsedK]);
    TORCH_CHECK(shape[0] == sizes.documents, call.op, ": seqused_k has the shape ", shape,
                ", but one number for each document is expected, [", sizes.documents, "]");
  }
}

template <class T>
void check_overflow(const Forward& call, const Sizes<T>& sizes) {
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
  TORCH_CHECK(!overflow, call.op, ": query, key and value are too large: the bytes of ",
              "B * H * L * S * D numbers overflow int64, for [..., H, L, S] = ",
              c10::ArrayRef<T>(sizes.scores()), ", D = ", sizes.head_dim,
              " and Dv = ", sizes.head_dim_v);
}

namespace {

// Of what a backward operator gets: what the forward operator returned, and its gradient.
template <class T>
void check_same_shape(const Forward& call, const char* argument, const at::Tensor& tensor,
                      c10::ArrayRef<T> expected, at::ScalarType dtype) {
  TORCH_CHECK(sizes_of<T>(tensor) == expected, call.op, "_backward: ", argument, " has the shape ",
              sizes_of<T>(tensor), ", but ", expected, " is expected");
  TORCH_CHECK(tensor.scalar_type() == dtype, call.op, "_backward: ", argument, " is ",
              name(tensor.scalar_type()), ", but ", name(dtype), " is expected");
}

}  // namespace

template <class T>
Sizes<T> check(const Forward& call) {
  check_tensors(call);
  check_supported(call);
  Sizes<T> sizes;
  check_rows(call, sizes);
  check_heads(call, sizes);
  check_batch(call, sizes);
  check_documents(call, sizes);
  check_option_sizes(call, sizes);
  check_overflow(call, sizes);
  return sizes;
}

template <class T>
Sizes<T> check(const Backward& c) {
  const Forward& f = c.forward;
  check_tensors(c);
  Sizes<T> sizes = check<T>(f);
  const auto output = sizes.output(), lse = sizes.lse();
  const at::ScalarType dtype = f.query().scalar_type(), lse_type = compute_type(dtype);
  check_same_shape<T>(f, "output", c.output, output, dtype);
  check_same_shape<T>(f, "logsumexp", c.lse, lse, lse_type);
  if (c.grad_output.defined()) check_same_shape<T>(f, "grad_output", c.grad_output, output, dtype);
  if (c.grad_lse.defined()) check_same_shape<T>(f, "grad_logsumexp", c.grad_lse, lse, lse_type);
  return sizes;
}

template <class T>
Sizes<T> check(const WeightsBackward& c) {
  const Forward& f = c.weights.forward;
  check_tensors(c);
  Sizes<T> sizes = check<T>(f);
  const at::ScalarType dtype = f.query().scalar_type();
  check_same_shape<T>(f, "grad_weights", c.grad_weights, sizes.weights(c.weights.reduce), dtype);
  check_same_shape<T>(f, "logsumexp", c.lse, sizes.lse(), compute_type(dtype));
  return sizes;
}

template <class T>
Sizes<T> check(const HardBackward& c) {
  const Forward& f = c.hard.forward;
  check_tensors(c);
  Sizes<T> sizes = check<T>(f);
  check_same_shape<T>(f, "grad_output", c.grad_output, sizes.output(), f.query().scalar_type());
  check_same_shape<T>(f, "index", c.index, sizes.lse(), at::kLong);
  return sizes;
}

template <class T>
typename Sizes<T>::Shape Sizes<T>::tensor(const T& heads, const T& rows, const T& columns) const {
  if (packed) return {rows, heads, columns};
  Shape shape = batch;
  if (has_heads) shape.push_back(heads);
  shape.push_back(rows);
  shape.push_back(columns);
  return shape;
}

template <class T>
typename Sizes<T>::Shape Sizes<T>::scores() const {
  if (packed) return {heads, seqlen_q, seqlen_k};
  return tensor(heads, seqlen_q, seqlen_k);
}

template <class T>
typename Sizes<T>::Shape Sizes<T>::lse() const {
  Shape shape = scores();
  shape.pop_back();
  return shape;
}

template <class T>
typename Sizes<T>::Shape Sizes<T>::weights(Reduce reduce) const {
  if (reduce == Reduce::none) return scores();
  Shape shape = batch;
  if (has_heads && reduce == Reduce::queries) shape.push_back(heads);
  if (reduce == Reduce::heads) shape.push_back(seqlen_q);
  shape.push_back(seqlen_k);
  return shape;
}

template <class T>
typename Sizes<T>::Shape Sizes<T>::per_head() const {
  if (packed) return {documents, heads};
  Shape shape = batch;
  shape.push_back(heads);
  return shape;
}

template struct Sizes<int64_t>;
template struct Sizes<c10::SymInt>;
template void check_option_sizes(const Forward&, const Sizes<int64_t>&);
template void check_option_sizes(const Forward&, const Sizes<c10::SymInt>&);
template void check_documents(const Forward&, Sizes<int64_t>&);
template void check_documents(const Forward&, Sizes<c10::SymInt>&);
template void check_overflow(const Forward&, const Sizes<int64_t>&);
template void check_overflow(const Forward&, const Sizes<c10::SymInt>&);
template Sizes<int64_t> check(const Forward&);
template Sizes<c10::SymInt> check(const Forward&);
template Sizes<int64_t> check(const Backward&);
template Sizes<c10::SymInt> check(const Backward&);
template Sizes<int64_t> check(const WeightsBackward&);
template Sizes<c10::SymInt> check(const WeightsBackward&);
template Sizes<int64_t> check(const HardBackward&);
template Sizes<c10::SymInt> check(const HardBackward&);

}  // namespace qkv
