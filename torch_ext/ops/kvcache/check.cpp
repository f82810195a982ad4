// What can be said of a call on a cache without the numbers in its index tensors.

#include "ops/kvcache/kvcache.h"

namespace qkv::ops {
namespace {

// key and value are in every place where one of them is, with these dimensions before D and Dv.
template <class T>
void check_pool(const Call& call, Sizes<T>& sizes, int64_t head, const char* key_dims,
                const char* value_dims) {
  const auto key = sizes_of<T>(call[arg::key]);
  expect_rank<T>(call, arg::key, 4, key_dims);
  expect_rank<T>(call, arg::value, 4, value_dims);
  sizes.head_dim_v = sizes_of<T>(call[arg::value])[3];
  expect_sizes<T>(call, arg::key, key_dims, {key[0], key[1], key[2], sizes.head_dim});
  expect_sizes<T>(call, arg::value, value_dims, {key[0], key[1], key[2], sizes.head_dim_v});
  const T heads = sizes.key_heads = sizes.value_heads = key[head];
  if (call.op->takes(opt::enable_gqa) && !call.options.enable_gqa) {
    TORCH_CHECK(are_equal(heads, sizes.heads), call.title(), ": ", call.name_of(arg::key), " has ",
                heads, " heads and query ", sizes.heads,
                ", but they must be equal without enable_gqa");
  }
  TORCH_CHECK(divides(heads, sizes.heads), call.title(), ": ", call.name_of(arg::key), " has ",
              heads, " heads and query ", sizes.heads, ", but the heads of ",
              call.name_of(arg::key), " must divide those of query");
}

// What an int8 key or value is multiplied by: one number, one a head, or one for every row of every
// head.
template <class T>
void check_scale(const Call& call, Argument scale, Argument of, int64_t head) {
  const at::Tensor& tensor = call[scale];
  const auto sizes = sizes_of<T>(tensor), cache = sizes_of<T>(call[of]);
  const auto rows = cache.slice(0, 3);
  const bool fits = tensor.dim() == 0   ? true
                    : tensor.dim() == 1 ? is_one_or(sizes[0], cache[head])
                                        : are_equal(sizes, rows);
  expect_shape<T>(fits, call, scale, ", but [1], [Hkv] = [", cache[head], "] or the shape of ",
                  call.name_of(of), " without its last dimension, ", rows, ", is expected");
}

// `head` is the dimension of key and value that has the heads.
template <class T>
void check_int8(const Call& call, int64_t head) {
  const char* title = call.title();
  const std::pair<Argument, Argument> both[] = {{arg::key, arg::key_scale},
                                                {arg::value, arg::value_scale}};
  for (const auto& [cache, scale] : both) {
    const bool is_char = call[cache].scalar_type() == at::kChar;
    TORCH_CHECK(is_char == is_int8(call), title, ": ", call.name_of(cache), " is ",
                name(call[cache].scalar_type()), ", but ", call.name_of(arg::key), " is ",
                name(call[arg::key].scalar_type()), "; expected int8 for both or neither");
    TORCH_CHECK(is_char || !call.has(scale), title, ": ", call.name_of(scale), " is given, but ",
                call.name_of(cache), " is ", name(call[cache].scalar_type()), "; expected int8");
    TORCH_CHECK(!is_char || call.has(scale), title, ": ", call.name_of(cache), " is int8, but ",
                call.name_of(scale), " is None; expected what its numbers are multiplied by");
    if (is_char) check_scale<T>(call, scale, cache, head);
  }
  TORCH_CHECK(!is_int8(call) || call[arg::query].scalar_type() != at::kDouble, title,
              ": query is float64, but with int8 ", call.name_of(arg::key),
              " float32, bfloat16 or float16 is expected");
}

// Its shape is [sequences, blocks of a sequence]; the blocks have `block_size` rows.
template <class T>
void check_block_table(const Call& call, const char* dims, Sizes<T>& sizes, const T& sequences,
                       const T& block_size) {
  expect_rank<T>(call, arg::block_table, 2, dims);
  const T columns = sizes_of<T>(call[arg::block_table])[1];
  expect_sizes<T>(call, arg::block_table, dims, {sequences, columns});
  expect_shape<T>(must_be(is_above(block_size, T(0))), call, arg::key,
                  ", but with block_table its blocks must have at least 1 row");
  int64_t product;
  const auto n = c10::SymInt(columns).maybe_as_int(), size = c10::SymInt(block_size).maybe_as_int();
  expect_shape<T>(!n || !size || !__builtin_mul_overflow(*n, *size, &product), call,
                  arg::block_table, ", which makes more keys than int64 counts with blocks of ",
                  block_size, " rows");
  sizes.seqlen_k = columns * block_size;
}

void expect_both(const Call& call, Argument a, Argument b) {
  if (!call.has(a)) std::swap(a, b);
  TORCH_CHECK(call.has(a) == call.has(b), call.title(), ": ", call.name_of(a), " is given, but ",
              call.name_of(b), " is None; expected both or neither");
}

void check_combination(const Call& call) {
  const char* op = call.title();
  for (const Argument argument : {arg::cache_batch_idx, arg::cache_leftpad})
    TORCH_CHECK(!call.has(argument) || !is_paged(call), op, ": ", call.name_of(argument),
                " and block_table are given, but one of them must be None");
  expect_both(call, arg::new_key, arg::new_value);
  TORCH_CHECK(!appends(call) || call.has(arg::cache_seqlens), op, ": ", call.name_of(arg::new_key),
              " is given, but cache_seqlens is None: the cache is full; expected the lengths "
              "before it is appended");
}

// cos and sin, [places, R / 2] with R <= D.
template <class T>
void check_rotary(const Call& call, const Sizes<T>& sizes) {
  expect_both(call, arg::cos, arg::sin);
  if (!call.has(arg::cos)) return;
  TORCH_CHECK(appends(call), call.title(),
              ": rotary_cos is given, but key is None; expected a key to rotate and append");
  expect_rank<T>(call, arg::cos, 2, "[places, R / 2]");
  const auto cos = sizes_of<T>(call[arg::cos]);
  expect_shape<T>(!is_true(is_above(T(2 * cos[1]), sizes.head_dim)), call, arg::cos,
                  ", but no more than D / 2 pairs are expected, of D = ", sizes.head_dim,
                  " numbers");
  expect_sizes<T>(call, arg::sin, "that of rotary_cos", cos);
}

template <class T>
void check_new_rows(const Call& call, const Sizes<T>& sizes) {
  if (!appends(call)) return;
  expect_rank<T>(call, arg::new_key, 4, "[B, Hkv, L_new, D]");
  const T rows = sizes_of<T>(call[arg::new_key])[2];
  expect_sizes<T>(call, arg::new_key, "[B, Hkv, L_new, D]",
                  {sizes.batch[0], sizes.key_heads, rows, sizes.head_dim});
  expect_sizes<T>(call, arg::new_value, "[B, Hkv, L_new, Dv]",
                  {sizes.batch[0], sizes.key_heads, rows, sizes.head_dim_v});
}

template <class T>
void check_cache_sizes(const Call& call, Sizes<T>& sizes) {
  check_combination(call);
  expect_rank<T>(call, arg::query, 4, "[B, H, L, D]");
  const auto query = sizes_of<T>(call[arg::query]);
  sizes.batch = {query[0]};
  sizes.has_heads = true;
  sizes.heads = query[1];
  sizes.seqlen_q = query[2];
  sizes.head_dim = query[3];
  const bool paged = is_paged(call);
  check_pool(call, sizes, 1, paged ? "[blocks, Hkv, block_size, D]" : "[rows, Hkv, S_max, D]",
             paged ? "[blocks, Hkv, block_size, Dv]" : "[rows, Hkv, S_max, Dv]");
  check_int8<T>(call, 1);
  const auto cache = sizes_of<T>(call[arg::key]);
  sizes.seqlen_k = cache[2];
  sizes.is_cache = true;
  if (paged) {
    check_block_table(call, "[B, blocks of a sequence]", sizes, query[0], cache[2]);
  } else if (!call.has(arg::cache_batch_idx)) {
    TORCH_CHECK(are_equal(cache[0], query[0]), call.title(), ": ", call.name_of(arg::key), " has ",
                cache[0], " rows and ", call.name_of(arg::query), " ", query[0],
                ", but they must be equal without cache_batch_idx or block_table");
  }
  for (const Argument each : {arg::cache_seqlens, arg::cache_batch_idx, arg::cache_leftpad})
    if (call.has(each)) expect_sizes<T>(call, each, "[B]", {query[0]});
  check_new_rows(call, sizes);
  check_rotary(call, sizes);
}

template <class T>
void check_paged_sizes(const Call& call, Sizes<T>& sizes) {
  expect_rank<T>(call, arg::query, 3, "[T, H, D]");
  const auto query = sizes_of<T>(call[arg::query]);
  sizes.packed = sizes.has_heads = true;
  sizes.seqlen_q = query[0];
  sizes.heads = query[1];
  sizes.head_dim = query[2];
  check_pool(call, sizes, 2, "[blocks, block_size, Hkv, D]", "[blocks, block_size, Hkv, Dv]");
  check_int8<T>(call, 2);
  check_documents(call, sizes);
  check_block_table(call, "[N, blocks of a document]", sizes, sizes.documents,
                    sizes_of<T>(call[arg::key])[1]);
}

}  // namespace

template <class T>
Sizes<T> check_kvcache(const Call& call) {
  return check<T>(call, call.is_packed() ? &check_paged_sizes<T> : &check_cache_sizes<T>);
}

template Sizes<int64_t> check_kvcache(const Call&);
template Sizes<c10::SymInt> check_kvcache(const Call&);

}  // namespace qkv::ops
