// qkv::latent_attention_with_kvcache.
#include <ATen/ATen.h>

#include "autograd/differentiate.h"
#include "autograd/run.h"
#include "call/autocast.h"
#include "call/from_options.h"
#include "ops/attention/attention.h"
#include "ops/kvcache/rows.h"
#include "ops/latent/latent.h"
#include "qkv/latent.h"

namespace qkv {
namespace ops {
namespace {

using c10::SymInt;

// The most keys that a row has after appending; where nobody may look at the numbers, how many
// there is room for.
SymInt most_keys(const Call& call) {
  SymInt room = call[arg::key].sym_size(2);
  if (is_paged(call)) room *= call[arg::block_table].sym_size(1);
  const at::Tensor& seqlens = call[arg::cache_seqlens];
  if (!seqlens.defined() || !is_plain(call) || seqlens.numel() == 0) return room;
  const SymInt added = appends(call) ? call[arg::new_key].sym_size(2) : SymInt(0);
  return (added + seqlens.max().item<int64_t>()).min(room);
}

// The first `keys` rows of every batch item, [B, 1, keys, C + R], in query's dtype.
at::Tensor rows_of_items(const Call& call, const SymInt& keys) {
  const auto select = [&](at::Tensor rows) {  // [rows, 1, S_max, *] or [blocks, 1, block size, *]
    if (is_paged(call)) {
      at::Tensor table = call[arg::block_table];
      if (is_plain(call)) {  // without the columns that no row needs
        const SymInt size = rows.sym_size(2);
        table = table.narrow_symint(1, 0, (keys + size - 1) / size);
      }
      // What a row does not need may be any number.
      const at::Tensor blocks = table.clamp(SymInt(0), rows.sym_size(0) - 1).flatten();
      rows = rows.index_select(0, blocks)
                 .unflatten_symint(0, {table.sym_size(0), table.sym_size(1)})
                 .transpose(1, 2)
                 .flatten(2, 3);
    } else if (call.has(arg::cache_batch_idx)) {
      rows = rows.narrow_symint(2, 0, keys).index_select(0, call[arg::cache_batch_idx]);
    }
    return rows.narrow_symint(2, 0, keys);
  };
  const at::Tensor rows = select(call[arg::key]), &scale = call[arg::key_scale];
  if (!scale.defined()) return rows;
  const at::Tensor factor = is_per_token(scale) ? select(scale.unsqueeze(-1)) : scale;
  return (rows * factor).to(call[arg::query].scalar_type());
}

// Appends, and looks at the numbers of `inner`'s lengths and tables: it has no queries here.
void append_rows(Call inner, const LatentSizes& s) {
  const at::Tensor& query = inner[arg::query];
  const at::Tensor none =
      query.new_empty_symint({query.sym_size(0), query.sym_size(1), 0, s.C + s.R});
  inner.set(arg::query, none);
  for (const Argument of_queries : {arg::bias, arg::spans}) inner.set(of_queries, kNone);
  run(inner);
}

// Attends to keys and values that are made of the cache's rows, as to a cache of their own.
Tensors attend_to_heads(Call inner, const Call& call, const LatentSizes& s) {
  const at::Tensor rows = rows_of_items(call, s.S);
  const auto [key, value] =
      expanded(call, rows.narrow_symint(-1, 0, s.C), rows.narrow_symint(-1, s.C, s.R));
  at::Tensor seqlens;
  if (call.has(arg::cache_seqlens)) {
    const SymInt added = appends(call) ? call[arg::new_key].sym_size(2) : SymInt(0);
    inner.set(arg::cache_seqlens, seqlens = call[arg::cache_seqlens] + added);
  }
  for (const Argument done : {arg::new_key, arg::new_value, arg::cache_batch_idx, arg::block_table,
                              arg::key_scale, arg::value_scale})
    inner.set(done, kNone);
  inner.set(arg::key, key);
  inner.set(arg::value, value);
  return run(inner);
}

void check_cache(const Call& call, const LatentSizes& s) {
  const char* const dims =
      is_paged(call) ? "[blocks, 1, block_size, C + R]" : "[rows, 1, S_max, C + R]";
  expect_rank<SymInt>(call, arg::key, 4, dims);
  const auto cache = call[arg::key].sym_sizes();
  expect_sizes<SymInt>(call, arg::key, dims, {cache[0], 1, cache[2], s.C + s.R});
  TORCH_CHECK(appends(call) || !call.has(arg::rope_keys), call.title(),
              ": rope_keys is given, but latents is None; expected both or neither");
}

Tensors latent_kvcache_composite(const Call& given) {
  check_query(given);
  Call call = given;
  const Autocast autocast(call, {arg::query, arg::query_rope, arg::new_key, arg::rope_keys,
                                 arg::key_weight, arg::value_weight});
  expect_rank<SymInt>(call, arg::query, 4, "[B, H, L, N]");
  LatentSizes s = check_queries(call);
  check_cache(call, s);
  set_scale(call, s);
  autograd::refuse_gradients(call);

  // The call on rows, by the names of this operator: what attention_with_kvcache would refuse of it
  // is refused before anything is written.
  Call whole = call;
  at::Tensor rows, values;  // what is appended
  if (appends(call)) {
    check_latents(call, arg::new_key, {call[arg::query].sym_size(0)}, s);
    whole.set(arg::new_key, rows = rows_of(call, arg::new_key));
    whole.set(arg::new_value, values = rows.narrow_symint(-1, 0, s.C));
  }
  const at::Tensor value_cache = call[arg::key].narrow_symint(-1, 0, s.C);
  whole.set(arg::value, value_cache);
  whole.set(arg::value_scale, call[arg::key_scale]);
  Sizes<SymInt>::Shape shape(call[arg::query].sym_sizes().slice(0, 3));
  shape.push_back(s.C + s.R);
  const at::Tensor of_rows = call[arg::query].new_empty_symint({1}).expand_symint(shape);
  whole.set(arg::query, of_rows);
  check_kvcache<SymInt>(whole);

  Call inner = whole.as(attention_with_kvcache);
  s.S = most_keys(call);
  const bool absorb = absorbs(call, s);
  // What has no queries appends below: of theirs, too, all is refused before.
  if (!absorb && is_plain(call)) cache_rows(inner, check_kvcache<int64_t>(inner));
  const at::Tensor query = absorb ? absorbed_query(call) : whole_query(call);
  inner.set(arg::query, query);
  if (!absorb) {
    append_rows(inner, s);
    return attend_to_heads(inner, call, s);
  }
  Tensors results = run(inner);
  results[0] = absorbed_output(call, results[0]);
  return results;
}

DefinedOperator latent_attention_with_kvcache(
    "latent_attention_with_kvcache",
    "latent_attention_with_kvcache(query_nope as query, query_rope, cache(a!) as key, key_weight, "
    "value_weight, latents?= as new_key, rope_keys?=, *, cache_seqlens?=, cache_batch_idx?=, "
    "cache_leftpad?=, block_table?=, softmax_scale= as scale, absorb=, causal=, "
    "window_size=, " QKV_SCORE_KEYWORDS
    ", sinks?=, cache_scale(b!)?= as key_scale, " QKV_PROGRAM_KEYWORDS
    ") -> output, softmax_lse as logsumexp",
    {.composite = &latent_kvcache_composite,
     .no_gradient = "call it under torch.no_grad() or detach() that"});

}  // namespace
}  // namespace ops

std::tuple<at::Tensor, at::Tensor> latent_attention_with_kvcache(
    const at::Tensor& query_nope, const at::Tensor& query_rope, const at::Tensor& cache,
    const at::Tensor& key_weight, const at::Tensor& value_weight,
    const std::optional<at::Tensor>& latents, const std::optional<at::Tensor>& rope_keys,
    const KvCacheOptions& options, std::optional<bool> absorb) {
  Call call = call_of(ops::latent_attention_with_kvcache, query_nope, cache, options);
  TORCH_CHECK(!tensor_of(options.v_scale()).defined(), call.title(),
              ": v_scale is given, but values are a part of the rows, whose scale is k_scale");
  const bool rotates =
      tensor_of(options.rotary_cos()).defined() || tensor_of(options.rotary_sin()).defined();
  TORCH_CHECK(!rotates, call.title(),
              ": rotary_cos or rotary_sin is given, but nullopt is expected: query_rope and "
              "rope_keys are rotated already");
  call.set(arg::query_rope, query_rope);
  call.set(arg::key_weight, key_weight);
  call.set(arg::value_weight, value_weight);
  call.set(arg::new_key, tensor_of(latents));
  call.set(arg::rope_keys, tensor_of(rope_keys));
  call.options.absorb = absorb;
  return pair_of(ops::latent_attention_with_kvcache.kernels.composite(call));
}

}  // namespace qkv
