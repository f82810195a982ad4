// The sizes of a call, and that they fit together.
#include <c10/core/SymInt.h>

#include "call/check.h"
#include "call/scores.h"

namespace qkv {
namespace {

// That `tensor` can be expanded to `shape`; `dims` are the names of its dimensions.
template <class T>
void check_broadcasts(const Call& call, Argument argument, const char* dims,
                      c10::ArrayRef<T> shape) {
  expect_shape<T>(expands_to(sizes_of<T>(call[argument]), shape), call, argument,
                  ", which does not broadcast to ", dims, " = ", shape);
}

template <class T>
void check_rank(const Call& call, Argument argument, const char* expected,
                const char* expected_packed) {
  if (call.is_packed()) return expect_rank<T>(call, argument, 3, expected_packed);
  expect_shape<T>(call[argument].dim() >= 2, call, argument,
                  ", but at least 2 dimensions are expected: ", expected);
}

// L, S, D, Dv.
template <class T>
void check_rows(const Call& call, Sizes<T>& sizes) {
  const bool packed = call.is_packed();
  const int64_t row = packed ? 2 : 1;
  check_rank<T>(call, arg::query, "[..., H, L, D]", "[T, H, D]");
  check_rank<T>(call, arg::key, "[..., H, S, D]", "[Tk, H, D]");
  sizes.packed = packed;
  sizes.seqlen_q = size_from_right<T>(call[arg::query], row);
  sizes.head_dim = size_from_right<T>(call[arg::query], 0);
  sizes.seqlen_k = size_from_right<T>(call[arg::key], row);
  const T key_dim = size_from_right<T>(call[arg::key], 0);
  expect_shape<T>(are_equal(key_dim, sizes.head_dim), call, arg::key,
                  ", but its last dimension must be query's, ", sizes.head_dim);
  if (!call.op->takes(arg::value)) return;
  check_rank<T>(call, arg::value, "[..., H, S, Dv]", "[Tk, H, Dv]");
  sizes.head_dim_v = size_from_right<T>(call[arg::value], 0);
  const T value_rows = size_from_right<T>(call[arg::value], row);
  expect_shape<T>(are_equal(value_rows, sizes.seqlen_k), call, arg::value, ", but its ",
                  packed ? "first" : "second last", " dimension must be key's, ", sizes.seqlen_k);
}

template <class T>
void check_heads(const Call& call, Sizes<T>& sizes) {
  const int64_t head = call.is_packed() ? 1 : 2;
  const T query = size_from_right<T>(call[arg::query], head);
  const T& key = sizes.key_heads = size_from_right<T>(call[arg::key], head);
  const T& value = sizes.value_heads =
      call.op->takes(arg::value) ? size_from_right<T>(call[arg::value], head) : T(key);
  sizes.heads = query;
  if (call.options.enable_gqa) {
    for (const auto& [name, heads] : {std::pair("key", &key), {"value", &value}})
      TORCH_CHECK(divides(*heads, query), call.title(), ": ", name, " has ", *heads,
                  " heads and query ", query, ", but with enable_gqa the heads of ", name,
                  " must divide those of query");
    return;
  }
  if (is_one(sizes.heads)) sizes.heads = key;
  if (is_one(sizes.heads)) sizes.heads = value;
  TORCH_CHECK(is_one_or(key, sizes.heads), call.title(), ": key has ", key, " heads and query ",
              query, ", but they must be equal, or one of them 1, without enable_gqa");
  TORCH_CHECK(is_one_or(value, sizes.heads), call.title(), ": value has ", value,
              " heads, but query and key have ", sizes.heads,
              "; they must be equal, or one of them 1, without enable_gqa");
}

template <class T>
void check_batch(const Call& call, Sizes<T>& sizes) {
  const c10::ArrayRef<const at::Tensor*> tensors(call.tensors.data(),
                                                 call.op->takes(arg::value) ? 3 : 2);
  int64_t rank = 0;
  for (const at::Tensor* tensor : tensors) rank = std::max(rank, tensor->dim());
  sizes.has_heads = rank > 2;
  if (rank <= 3) return;
  sizes.batch.resize(rank - 3, T(1));
  for (int64_t i = 3; i < rank; ++i) {
    T& size = sizes.batch[rank - 1 - i];
    for (const at::Tensor* tensor : tensors) {
      const T n = size_from_right<T>(*tensor, i);
      if (is_one(size)) size = n;
      TORCH_CHECK(is_one_or(n, size), call.title(), ": the leading dimensions of query ",
                  sizes_of<T>(call[arg::query]), ", key ", sizes_of<T>(call[arg::key]),
                  call.op->takes(arg::value) ? " and value " : "",
                  call.op->takes(arg::value) ? sizes_of<T>(call[arg::value]) : c10::ArrayRef<T>(),
                  " do not broadcast: dimension ", -1 - i, " must be equal or 1");
    }
  }
}

// The most spans of a query. Each one is looked at, and a tensor that is expanded could name any
// number of them without taking memory for them.
constexpr int64_t kMostSpans = 256;

// A mask, or spans. The rows and columns of a mask for documents, and its columns for a cache, may
// be more than any of them needs: check_masks_cover says whether they are enough.
template <class T>
void check_mask(const Call& call, Argument argument, const Sizes<T>& sizes) {
  const at::Tensor& mask = call[argument];
  const bool is_spans = kArguments[argument].shape == Shape::spans;
  const T columns = size_from_right<T>(mask, 0);
  const auto fit = [&] {
    return must_be(is_above(columns, T(1))) && must_be(is_above(T(2 * kMostSpans + 1), columns)) &&
           divides(T(2), columns);
  };
  expect_shape<T>(!is_spans || fit(), call, argument,
                  ", but [..., H, L, 2 n] is expected, the begins and ends of 1 to ", kMostSpans,
                  " spans");
  typename Sizes<T>::Shape expected = sizes.scores();
  if (sizes.packed) expected.insert(expected.begin(), sizes.documents);
  const int64_t rank = expected.size();
  if (sizes.packed) expected[rank - 2] = size_from_right<T>(mask, 1);
  if (sizes.packed || sizes.is_cache || is_spans) expected[rank - 1] = columns;
  const char* const dims = is_spans       ? "[..., H, L, 2 n]"
                           : sizes.packed ? "[N, H, L, S]"
                                          : "[..., H, L, S]";
  check_broadcasts<T>(call, argument, dims, expected);
}

template <class T>
void check_option_sizes(const Call& call, const Sizes<T>& sizes) {
  for (int i = 0; i < arg::output; ++i) {
    const auto argument = Argument(i);
    if (!call.has(argument)) continue;
    if (is_mask(argument)) check_mask(call, argument, sizes);
    if (kArguments[i].shape == Shape::per_head)
      check_broadcasts<T>(call, argument, sizes.packed ? "[N, H]" : "[..., H]", sizes.per_head());
  }
  if (call.options.dropout_p > 0) {
    const auto seed = sizes_of<T>(call[arg::dropout_seed]);
    const T items = sizes.dropout_items();
    expect_shape<T>(is_one(seed[0]) || divides(seed[0], items), call, arg::dropout_seed,
                    ", but [1] is expected, or [n] for n equal parts of the ", items,
                    sizes.packed ? " documents" : " batch items");
  }
}

template <class T>
void check_overflow(const Call& call, const Sizes<T>& sizes) {
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
  TORCH_CHECK(!overflow, call.title(), ": query, key and value are too large: the bytes of ",
              "B * H * L * S * D numbers overflow int64, for [..., H, L, S] = ",
              c10::ArrayRef<T>(sizes.scores()), ", D = ", sizes.head_dim,
              " and Dv = ", sizes.head_dim_v);
}

void check_has_tangent(const Call& call, Argument primal) {
  const bool has = call.has(primal);
  TORCH_CHECK(has && at::isFloatingType(call[primal].scalar_type()), call.title(), ": ",
              call.name_of(tangent_of(primal)), " is given, but ", call.name_of(primal), " is ",
              has ? name(call[primal].scalar_type()) : "None");
}

// What an operator is given beside the forward operator's own arguments has the sizes and the dtype
// of something: a tangent those of its argument; results, their gradients and their tangents those
// that the call gives them.
template <class T>
void check_companions(const Call& call, const Sizes<T>& sizes) {
  for (const Parameter& p : call.op->parameters) {
    const auto argument = Argument(p.which);
    if (!p.is_tensor || !call.has(argument)) continue;
    const auto expect = [&](c10::ArrayRef<T> shape, at::ScalarType dtype) {
      expect_sizes(call, argument, "", shape);
      expect_dtype(call[argument].scalar_type() == dtype, call, argument, ", but ", name(dtype),
                   " is expected");
    };
    const Argument primal = primal_of(argument);
    if (is_result(argument)) {
      expect(sizes.result(argument, call.options.reduce), result_type(call, argument));
    } else if (primal != arg::count) {
      check_has_tangent(call, primal);
      expect(sizes_of<T>(call[primal]), call[primal].scalar_type());
    }
  }
}

}  // namespace

void check_masks_cover(const Call& call, int64_t item, int64_t seqlen_q, int64_t seqlen_k) {
  if (seqlen_k == 0) return;  // without a pair, nobody looks at them
  for (int i = 0; i < arg::output; ++i) {
    const auto argument = Argument(i);
    if (!is_mask(argument) || !call.has(argument)) continue;
    const at::Tensor& mask = call[argument];
    const int64_t rows = size_from_right<int64_t>(mask, 1);
    const bool is_spans = kArguments[i].shape == Shape::spans;
    const int64_t columns = is_spans ? 1 : size_from_right<int64_t>(mask, 0);
    expect_shape<int64_t>((rows == 1 || rows >= seqlen_q) && (columns == 1 || columns >= seqlen_k),
                          call, argument, ", but ", call.is_packed() ? "document " : "batch item ",
                          item, " has ", seqlen_q, " queries and ", seqlen_k,
                          " keys; a row and a column for each, or one for all, are expected");
  }
}

template <class T>
void check_documents(const Call& call, Sizes<T>& sizes) {
  if (!call.is_packed()) return;
  const T ends = sizes_of<T>(call[arg::cu_seq_q])[0];
  expect_shape<T>(must_be(is_above(ends, T(0))), call, arg::cu_seq_q,
                  ", but [N + 1] is expected for N documents");
  sizes.documents = ends - 1;
  if (call.has(arg::cu_seq_k))
    expect_shape<T>(are_equal(sizes_of<T>(call[arg::cu_seq_k])[0], ends), call, arg::cu_seq_k,
                    ", but cu_seq_q's is expected, [", ends, "]");
  if (call.has(arg::seqused_k))
    expect_shape<T>(are_equal(sizes_of<T>(call[arg::seqused_k])[0], sizes.documents), call,
                    arg::seqused_k, ", but one number for each document is expected, [",
                    sizes.documents, "]");
}

template <class T>
void check_dense(const Call& call, Sizes<T>& sizes) {
  check_rows(call, sizes);
  check_heads(call, sizes);
  check_batch(call, sizes);
  check_documents(call, sizes);
}

template <class T>
Sizes<T> check(const Call& call, void (*check_sizes)(const Call&, Sizes<T>&)) {
  check_tensors(call);
  check_supported(call);
  Sizes<T> sizes;
  check_sizes(call, sizes);
  check_option_sizes(call, sizes);
  check_score_program(call, sizes);
  check_overflow(call, sizes);
  // A forward operator has no companions but tangents, and one that takes any takes query's.
  if (call.op->is_backward || call.op->takes(arg::query_tangent)) check_companions(call, sizes);
  return sizes;
}

#define QKV_INSTANTIATE(T)                               \
  template void check_documents(const Call&, Sizes<T>&); \
  template void check_dense(const Call&, Sizes<T>&);     \
  template Sizes<T> check(const Call&, void (*)(const Call&, Sizes<T>&));
QKV_INSTANTIATE(int64_t)
QKV_INSTANTIATE(c10::SymInt)

}  // namespace qkv
