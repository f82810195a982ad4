// Decoding with a cache of keys and values, for LibTorch programs; no Python needed.
//
//   auto [output, lse] = qkv::attention_with_kvcache(
//       query, k_cache, v_cache, key, value,
//       qkv::KvCacheOptions().cache_seqlens(lengths).causal(true));
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/api/include/torch/arg.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>

#include "qkv/export.h"

namespace qkv {

// Index tensors are int32 or int64.
struct KvCacheOptions {
  using Window = std::array<int64_t, 2>;  // {left, right}

  // [B]: how many keys each row of the cache has, before key is appended. Not set: it is full.
  TORCH_ARG(std::optional<at::Tensor>, cache_seqlens) = std::nullopt;
  // [B]: the row of the cache that each batch item uses, b when not set. With key, all different.
  TORCH_ARG(std::optional<at::Tensor>, cache_batch_idx) = std::nullopt;
  // [B]: so many keys at the beginning of a row are not seen; no more than cache_seqlens.
  TORCH_ARG(std::optional<at::Tensor>, cache_leftpad) = std::nullopt;
  // [B, M]: the caches are [blocks, Hkv, block size, *], and row j of batch item b is row
  // j % block size of block block_table[b][j / block size]. Not with the two above.
  TORCH_ARG(std::optional<at::Tensor>, block_table) = std::nullopt;
  // [n, R / 2], float32 or the query's dtype: query and key are rotated (qkv/rotate.h), key before
  // it is appended. Row i of both is for place i of a row of the cache: new key i is at place
  // cache_seqlens + i, and query i too if causal or with a window_size; else all queries are at
  // cache_seqlens. Both or neither, and only with key.
  TORCH_ARG(std::optional<at::Tensor>, rotary_cos) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, rotary_sin) = std::nullopt;
  // Whether pair i is the numbers 2 i and 2 i + 1, or i and i + R / 2.
  TORCH_ARG(bool, rotary_interleaved) = true;
  // Multiplies the scores; finite. 1 / sqrt(D) when not set.
  TORCH_ARG(std::optional<double>, softmax_scale) = std::nullopt;
  // With S keys after appending, query i sees keys j <= i + S - L: bottom-right aligned.
  TORCH_ARG(bool, causal) = false;
  // As in AttentionOptions, as are softcap, alibi_slopes and sinks, the last two broadcastable to
  // [B, H].
  TORCH_ARG(std::optional<Window>, window_size) = std::nullopt;
  TORCH_ARG(double, softcap) = 0.0;
  // float32, or the query's dtype, broadcastable to [B, H, L, S] with an S of at least the most
  // keys that a row has: added to the score of query i and key j, counted from the first that is
  // seen.
  TORCH_ARG(std::optional<at::Tensor>, bias) = std::nullopt;
  // int32, broadcastable to [B, H, L, 2 n]: query i sees only keys begin <= j < end, for each begin
  // and end of its row, counted from the first key that is seen. See AttentionOptions.
  TORCH_ARG(std::optional<at::Tensor>, spans) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, alibi_slopes) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, sinks) = std::nullopt;
  // As in AttentionOptions; a query's number is its position, that of the last one S - 1.
  TORCH_ARG(std::string, score_program) = "";
  TORCH_ARG(std::optional<at::Tensor>, score_tables) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, score_indices) = std::nullopt;
  // float32, of int8 caches: what their numbers are multiplied by, [1] for all, [Hkv] for each head
  // or the cache's shape without its last dimension for each row of each head. Appending writes the
  // last kind, and uses the others.
  TORCH_ARG(std::optional<at::Tensor>, k_scale) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, v_scale) = std::nullopt;
};

// Appends key and value to the caches, in place, at cache_seqlens; then attends to what each row of
// the cache has, the new ones included.
//
//   query [B, H, L, D], k_cache [B, Hkv, S_max, D], v_cache [B, Hkv, S_max, Dv],
//   key [B, Hkv, L_new, D], value [B, Hkv, L_new, Dv]
//   -> output [B, H, L, Dv], laid out in memory like query, and softmax_lse [B, H, L]
//
// All of one floating dtype, or the caches int8; Hkv divides H; any strides. With cache_batch_idx
// the caches have any number of rows. A row that has nothing to attend to: output 0, softmax_lse
// -inf (the sink).
//
// For inference: throws c10::Error if a tensor requires grad while gradients are recorded, and,
// before anything is written, for sizes, dtypes, lengths and tables that do not fit, for two
// batch items that would write to the same place and for caches that share memory with themselves
// or with another argument.
QKV_API std::tuple<at::Tensor, at::Tensor> attention_with_kvcache(
    const at::Tensor& query, const at::Tensor& k_cache, const at::Tensor& v_cache,
    const std::optional<at::Tensor>& key = std::nullopt,
    const std::optional<at::Tensor>& value = std::nullopt, const KvCacheOptions& options = {});

}  // namespace qkv
