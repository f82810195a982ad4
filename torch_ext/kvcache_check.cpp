// What can be said of a call on a cache without the numbers in its index tensors.
#include <c10/core/SymInt.h>

#include <cmath>

#include "kvcache.h"

namespace qkv {
namespace {

template <class T>
using Shape = c10::SmallVector<T, 4>;

void check_rank(const char* op, const char* argument, const at::Tensor& tensor, int64_t rank,
                const char* dims) {
  TORCH_CHECK(tensor.dim() == rank, op, ": ", argument, " has the shape ", tensor.sym_sizes(),
              ", but ", rank, " dimensions are expected: ", dims);
}

template <class T>
void check_shape(const char* op, const char* argument, const at::Tensor& tensor, const char* dims,
                 const Shape<T>& expected) {
  TORCH_CHECK(sizes_of<T>(tensor) == c10::ArrayRef<T>(expected), op, ": ", argument,
              " has the shape ", sizes_of<T>(tensor), ", but ", dims, " = ",
              c10::ArrayRef<T>(expected), " is expected");
}

// key and value are in every place where one of them is, with these dimensions before D and Dv.
template <class T>
void check_pool(const Forward& f, Sizes<T>& sizes, int64_t head, const char* key_dims,
                const char* value_dims) {
  const auto key = sizes_of<T>(f.key());
  check_rank(f.op, f.name_of(kKey), f.key(), 4, key_dims);
  check_rank(f.op, f.name_of(kValue), f.value(), 4, value_dims);
  sizes.head_dim_v = sizes_of<T>(f.value())[3];
  check_shape<T>(f.op, f.name_of(kKey), f.key(), key_dims,
                 {key[0], key[1], key[2], sizes.head_dim});
  check_shape<T>(f.op, f.name_of(kValue), f.value(), value_dims,
                 {key[0], key[1], key[2], sizes.head_dim_v});
  const T heads = sizes.key_heads = sizes.value_heads = key[head];
  if (!f.options.enable_gqa) {
    TORCH_CHECK(heads == sizes.heads, f.op, ": ", f.name_of(kKey), " has ", heads,
                " heads and query ", sizes.heads, ", but they must be equal without enable_gqa");
  }
  const bool divides = heads == 0 ? sizes.heads == 0 : sizes.heads % heads == 0;
  TORCH_CHECK(divides, f.op, ": ", f.name_of(kKey), " has ", heads, " heads and query ",
              sizes.heads, ", but the heads of ", f.name_of(kKey), " must divide those of query");
}

// Its shape is [sequences, blocks of a sequence]; the blocks have `block_size` rows.
template <class T>
void check_block_table(const Forward& f, const at::Tensor& table, const char* dims, Sizes<T>& sizes,
                       const T& sequences, const T& block_size) {
  check_index(f.op, "block_table", table);
  check_rank(f.op, "block_table", table, 2, dims);
  const T columns = sizes_of<T>(table)[1];
  check_shape<T>(f.op, "block_table", table, dims, {sequences, columns});
  TORCH_CHECK(block_size >= 1, f.op, ": ", f.name_of(kKey), " has the shape ", sizes_of<T>(f.key()),
              ", but with block_table its blocks must have at least 1 row");
  int64_t product;
  const auto n = c10::SymInt(columns).maybe_as_int(), size = c10::SymInt(block_size).maybe_as_int();
  TORCH_CHECK(!n || !size || !__builtin_mul_overflow(*n, *size, &product), f.op,
              ": block_table has the shape ", sizes_of<T>(table),
              ", which makes more keys than int64 counts with blocks of ", block_size, " rows");
  sizes.seqlen_k = columns * block_size;
}

// What every batch item has one of.
template <class T>
void check_lengths(const KvCache& call, const char* argument, const at::Tensor& tensor,
                   const T& batch) {
  if (!tensor.defined()) return;
  const Forward& f = call.forward;
  check_index(f.op, argument, tensor);
  check_shape<T>(f.op, argument, tensor, "[B]", {batch});
}

void check_combination(const KvCache& call) {
  const char* op = call.forward.op;
  const auto excludes = [&](const char* a, const at::Tensor& x, const char* b,
                            const at::Tensor& y) {
    TORCH_CHECK(!x.defined() || !y.defined(), op, ": ", a, " and ", b,
                " are given, but one of them must be None");
  };
  excludes("cache_batch_idx", call.cache_batch_idx, "block_table", call.block_table);
  excludes("cache_leftpad", call.cache_leftpad, "block_table", call.block_table);
  TORCH_CHECK(call.key.defined() == call.value.defined(), op, ": ",
              call.key.defined() ? "key" : "value", " is given, but ",
              call.key.defined() ? "value" : "key", " is None; expected both or neither");
  TORCH_CHECK(!call.appends() || call.cache_seqlens.defined(), op,
              ": key is given, but cache_seqlens is None: the cache is full; expected the lengths "
              "before key is appended");
}

template <class T>
void check_new_rows(const KvCache& call, const Sizes<T>& sizes) {
  if (!call.appends()) return;
  const Forward& f = call.forward;
  for (const auto& [argument, tensor] : {std::pair("key", &call.key), {"value", &call.value}}) {
    TORCH_CHECK(tensor->scalar_type() == f.query().scalar_type(), f.op, ": ", argument, " is ",
                name(tensor->scalar_type()), ", but query is ", name(f.query().scalar_type()));
  }
  check_rank(f.op, "key", call.key, 4, "[B, Hkv, L_new, D]");
  const T rows = sizes_of<T>(call.key)[2];
  check_shape<T>(f.op, "key", call.key, "[B, Hkv, L_new, D]",
                 {sizes.batch[0], sizes.key_heads, rows, sizes.head_dim});
  check_shape<T>(f.op, "value", call.value, "[B, Hkv, L_new, Dv]",
                 {sizes.batch[0], sizes.key_heads, rows, sizes.head_dim_v});
}

}  // namespace

void check_tensors(const KvCache& call) {
  const Forward& f = call.forward;
  check_tensors(f);
  for (const auto& [argument, tensor] : {std::pair("key", &call.key),
                                         {"value", &call.value},
                                         {"cache_seqlens", &call.cache_seqlens},
                                         {"cache_batch_idx", &call.cache_batch_idx},
                                         {"cache_leftpad", &call.cache_leftpad},
                                         {"block_table", &call.block_table}})
    if (tensor->defined()) check_tensor(f.op, argument, *tensor, f.query());
}

void check_tensors(const PagedVarlen& call) {
  check_tensors(call.forward);
  check_tensor(call.forward.op, "block_table", call.block_table, call.forward.query());
}

template <class T>
Sizes<T> check(const KvCache& call) {
  const Forward& f = call.forward;
  check_tensors(call);
  const at::ScalarType query_dtype = f.query().scalar_type();
  TORCH_CHECK_VALUE(!f.options.scale || is_finite_for(query_dtype, *f.options.scale), f.op,
                    ": softmax_scale is ", f.options.scale.value_or(0), ", but ",
                    finite_for(query_dtype), " is expected");
  check_supported(f);
  check_combination(call);
  check_rank(f.op, "query", f.query(), 4, "[B, H, L, D]");
  const auto query = sizes_of<T>(f.query());
  Sizes<T> sizes;
  sizes.batch = {query[0]};
  sizes.has_heads = true;
  sizes.heads = query[1];
  sizes.seqlen_q = query[2];
  sizes.head_dim = query[3];
  const bool paged = call.is_paged();
  check_pool(f, sizes, 1, paged ? "[blocks, Hkv, block_size, D]" : "[rows, Hkv, S_max, D]",
             paged ? "[blocks, Hkv, block_size, Dv]" : "[rows, Hkv, S_max, Dv]");
  const auto cache = sizes_of<T>(f.key());
  sizes.seqlen_k = cache[2];
  if (paged) {
    check_block_table(f, call.block_table, "[B, blocks of a sequence]", sizes, query[0], cache[2]);
  } else if (!call.cache_batch_idx.defined()) {
    TORCH_CHECK(cache[0] == query[0], f.op, ": k_cache has ", cache[0], " rows and query ",
                query[0], ", but they must be equal without cache_batch_idx or block_table");
  }
  check_lengths(call, "cache_seqlens", call.cache_seqlens, query[0]);
  check_lengths(call, "cache_batch_idx", call.cache_batch_idx, query[0]);
  check_lengths(call, "cache_leftpad", call.cache_leftpad, query[0]);
  check_new_rows(call, sizes);
  check_option_sizes(f, sizes);
  check_overflow(f, sizes);
  return sizes;
}

template <class T>
Sizes<T> check(const PagedVarlen& call) {
  const Forward& f = call.forward;
  check_tensors(call);
  check_supported(f);
  check_rank(f.op, "query", f.query(), 3, "[T, H, D]");
  const auto query = sizes_of<T>(f.query());
  Sizes<T> sizes;
  sizes.packed = sizes.has_heads = true;
  sizes.seqlen_q = query[0];
  sizes.heads = query[1];
  sizes.head_dim = query[2];
  check_pool(f, sizes, 2, "[blocks, block_size, Hkv, D]", "[blocks, block_size, Hkv, Dv]");
  check_documents(f, sizes);
  check_block_table(f, call.block_table, "[N, blocks of a document]", sizes, sizes.documents,
                    sizes_of<T>(f.key())[1]);
  check_option_sizes(f, sizes);
  check_overflow(f, sizes);
  return sizes;
}

template Sizes<int64_t> check(const KvCache&);
template Sizes<c10::SymInt> check(const KvCache&);
template Sizes<int64_t> check(const PagedVarlen&);
template Sizes<c10::SymInt> check(const PagedVarlen&);

}  // namespace qkv
