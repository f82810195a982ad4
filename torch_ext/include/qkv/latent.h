// Multi-head latent attention (MLA), as DeepSeek's models have it: key and value of all heads are
// projections of one short vector for each position, the latent, so that a cache holds only that.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "qkv/export.h"
#include "qkv/kvcache.h"
#include "qkv/options.h"

namespace qkv {

// attention of each head h to the keys cat(latents @ key_weight[h]^T, rope_keys) and the values
// latents @ value_weight[h]^T:
//
//   query_nope [..., H, L, N], query_rope [..., H, L, R], latents [..., 1, S, C],
//   rope_keys [..., 1, S, R], key_weight [H, N, C], value_weight [H, Dv, C]
//   -> output [..., H, L, Dv], logsumexp [..., H, L]
//
// Without rope_keys, latents are [..., 1, S, C + R]: rows that have both, as a cache holds them.
//
// Two ways to it give the same, up to rounding. With `absorb`, the query goes through key_weight
// and the output through value_weight, and all heads attend to the latents themselves: what takes
// less work where there are few queries. Without, keys and values are made first. When not set, the
// shapes decide. The options are those of attention, its scale 1 / sqrt(N + R) when not set;
// enable_gqa says nothing. Differentiable with respect to all tensors, as attention is. CPU only.
QKV_API std::tuple<at::Tensor, at::Tensor> latent_attention(
    const at::Tensor& query_nope, const at::Tensor& query_rope, const at::Tensor& latents,
    const std::optional<at::Tensor>& rope_keys, const at::Tensor& key_weight,
    const at::Tensor& value_weight, const AttentionOptions& options = {},
    std::optional<bool> absorb = std::nullopt);

// attention_with_kvcache to a cache that has a row for each position, the latent and the rotated
// key: appends latents and rope_keys in place, then attends. Values are a part of the rows, so that
// nothing else is kept.
//
//   query_nope [B, H, L, N], query_rope [B, H, L, R], cache [B, 1, S_max, C + R] or, with
//   block_table, [blocks, 1, block size, C + R], latents [B, 1, L_new, C], rope_keys
//   [B, 1, L_new, R] -> output [B, H, L, Dv], softmax_lse [B, H, L]
//
// Of the options, k_scale is that of an int8 cache's rows, cache_scale in messages; v_scale,
// rotary_cos and rotary_sin are not to be set. For inference; throws as attention_with_kvcache
// does.
QKV_API std::tuple<at::Tensor, at::Tensor> latent_attention_with_kvcache(
    const at::Tensor& query_nope, const at::Tensor& query_rope, const at::Tensor& cache,
    const at::Tensor& key_weight, const at::Tensor& value_weight,
    const std::optional<at::Tensor>& latents = std::nullopt,
    const std::optional<at::Tensor>& rope_keys = std::nullopt, const KvCacheOptions& options = {},
    std::optional<bool> absorb = std::nullopt);

}  // namespace qkv
