// qkv::latent_attention.
#include "ops/attention/attention.h"
#include "call/autocast.h"
#include "call/from_options.h"
#include "ops/indexed/indexed.h"
#include "ops/latent/latent.h"
#include "qkv/latent.h"

namespace qkv {
namespace ops {
namespace {

// attention's results, of this query, key and value, with the options of `call`.
Tensors attend_to(const Call& call, const at::Tensor& query, const at::Tensor& key,
                  const at::Tensor& value) {
  Call inner = call.as(attention_forward);
  inner.set(arg::query, query);
  inner.set(arg::key, key);
  inner.set(arg::value, value);
  inner.options.enable_gqa = true;
  if (!call.has(arg::indices)) return attend(std::move(inner));
  inner.set(arg::indices, call[arg::indices]);
  return attend_to_indices(inner);
}

Tensors latent_composite(const Call& given) {
  check_query(given);
  Call call = given;
  const Autocast autocast(call, {arg::query, arg::query_rope, arg::key, arg::rope_keys,
                                 arg::key_weight, arg::value_weight, arg::attn_mask});
  LatentSizes s = check_queries(call);
  const at::Tensor &query = call[arg::query], &latents = call[arg::key];
  check_latents(call, arg::key, query.sym_sizes().slice(0, query.dim() - 3), s);
  set_scale(call, s);
  if (absorbs(call, s)) {
    const at::Tensor rows = rows_of(call, arg::key);
    Tensors results = attend_to(call, absorbed_query(call), rows, rows.narrow_symint(-1, 0, s.C));
    results[0] = absorbed_output(call, results[0]);
    return results;
  }
  const auto [key, value] =
      call.has(arg::rope_keys)
          ? expanded(call, latents, call[arg::rope_keys])
          : expanded(call, latents.narrow_symint(-1, 0, s.C), latents.narrow_symint(-1, s.C, s.R));
  return attend_to(call, whole_query(call), key, value);
}

DefinedOperator latent_attention(
    "latent_attention",
    "latent_attention(query_nope as query, query_rope, latents as key, rope_keys?, key_weight, "
    "value_weight, attn_mask?=, dropout_p=, is_causal=, *, scale=, absorb=, "
    "window_size=, " QKV_SCORE_KEYWORDS ", sinks?=, indices?=, " QKV_PROGRAM_KEYWORDS
    ") -> output, logsumexp",
    {.composite = &latent_composite});

}  // namespace
}  // namespace ops

std::tuple<at::Tensor, at::Tensor> latent_attention(
    const at::Tensor& query_nope, const at::Tensor& query_rope, const at::Tensor& latents,
    const std::optional<at::Tensor>& rope_keys, const at::Tensor& key_weight,
    const at::Tensor& value_weight, const AttentionOptions& options, std::optional<bool> absorb) {
  Call call = call_of(ops::latent_attention, query_nope, latents, kNone, options);
  call.set(arg::query_rope, query_rope);
  call.set(arg::rope_keys, tensor_of(rope_keys));
  call.set(arg::key_weight, key_weight);
  call.set(arg::value_weight, value_weight);
  call.options.absorb = absorb;
  return pair_of(ops::latent_attention.kernels.composite(call));
}

}  // namespace qkv
