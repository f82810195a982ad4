// Layers: torch::nn::MultiheadAttention on qkv::attention, and self- and cross attention as models
// of today have them.
//
//   qkv::nn::MultiheadAttention layer(torch::nn::MultiheadAttentionOptions(512, 8).dropout(0.1));
//   auto [output, weights] = layer(query, key, value);
//
//   auto options = qkv::nn::SelfAttentionOptions(512, 8).num_kv_heads(2);
//   qkv::nn::SelfAttention decoder(options.frequencies(qkv::nn::rotary_frequencies(64)));
//   torch::NoGradGuard no_grad;
//   auto cache = decoder->new_cache(1, 4096);
//   auto output = decoder(prompt, at::Tensor(), &cache);
//
// Of MultiheadAttention options, names of the parameters, initial values, arguments and results are
// those of torch's class, so archives that torch::save has written of one load into the other. What
// differs: attention is fused; boolean masks of both kinds and masks [B * H, L, S] are taken, as in
// Python; value may have another width than key; a query with nothing to attend to gets the bias of
// out_proj and weights of 0, where torch has NaN.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/options/activation.h>
#include <torch/nn/pimpl.h>

#include <tuple>

#include "qkv/attention.h"
#include "qkv/export.h"

namespace qkv::nn {

class QKV_API MultiheadAttentionImpl : public torch::nn::Cloneable<MultiheadAttentionImpl> {
 public:
  MultiheadAttentionImpl(int64_t embed_dim, int64_t num_heads)
      : MultiheadAttentionImpl(torch::nn::MultiheadAttentionOptions(embed_dim, num_heads)) {}
  // `scores`: what else the scores are made with (is_causal, window_size, scale, softcap, bias,
  // alibi_slopes, sinks). attn_mask, dropout_p and enable_gqa in it are not used. Throws c10::Error
  // where embed_dim is no multiple of num_heads, and for what goes by the places of keys
  // (is_causal, window_size, spans, alibi_slopes) beside add_bias_kv and add_zero_attn, whose keys
  // have none.
  explicit MultiheadAttentionImpl(const torch::nn::MultiheadAttentionOptions& options,
                                  const AttentionOptions& scores = {});

  // query [L, B, E], key [S, B, kdim], value [S, B, vdim] -> output [L, B, E] and the weights, as
  // they are after dropout: [B, L, S], the mean over the heads, or with average_attn_weights =
  // false [B, H, L, S]; undefined without need_weights, which is faster and needs no memory that
  // grows with L * S. S counts the keys that add_bias_kv and add_zero_attn add.
  //
  // key_padding_mask [B, S], attn_mask [L, S] or [B * H, L, S]: bool, true hides the key, or
  // float32 or the query's dtype, added to the scores. Differentiable as qkv::attention is. Throws
  // c10::Error, naming the argument.
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& query, const at::Tensor& key,
                                             const at::Tensor& value,
                                             const at::Tensor& key_padding_mask = {},
                                             bool need_weights = true,
                                             const at::Tensor& attn_mask = {},
                                             bool average_attn_weights = true);

  void reset() override;

  torch::nn::MultiheadAttentionOptions options;
  AttentionOptions scores;

  // W_Q, W_K and W_V are the rows of in_proj_weight [3 E, E], in this order; where kdim or vdim is
  // not E, it is undefined, and they are q_proj_weight [E, E], k_proj_weight [E, kdim] and
  // v_proj_weight [E, vdim]. Their biases: in_proj_bias [3 E]. W_O: out_proj.
  at::Tensor in_proj_weight, q_proj_weight, k_proj_weight, v_proj_weight, in_proj_bias;
  at::Tensor bias_k, bias_v;  // [1, 1, E], of add_bias_kv
  torch::nn::Linear out_proj = nullptr;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({3, torch::nn::AnyValue(at::Tensor())}, {4, torch::nn::AnyValue(true)},
                           {5, torch::nn::AnyValue(at::Tensor())}, {6, torch::nn::AnyValue(true)})
};

TORCH_MODULE(MultiheadAttention);

// base ** (-2 i / R) of pair i, [R / 2]: by which angle it turns from one position to the next.
QKV_API at::Tensor rotary_frequencies(int64_t R, double base = 10'000.0);

// With E for embed_dim, H and Hkv for the heads, D for head_dim.
struct SelfAttentionOptions {
  SelfAttentionOptions(int64_t embed_dim, int64_t num_heads)
      : embed_dim_(embed_dim), num_heads_(num_heads), num_kv_heads_(num_heads) {}
  TORCH_ARG(int64_t, embed_dim);
  TORCH_ARG(int64_t, num_heads);
  TORCH_ARG(int64_t, num_kv_heads);                            // divides num_heads
  TORCH_ARG(std::optional<int64_t>, head_dim) = std::nullopt;  // E / H when not set
  // [R / 2], R <= D: the first R numbers of a head of query and key turn. Not set: none do.
  TORCH_ARG(std::optional<at::Tensor>, frequencies) = std::nullopt;
  TORCH_ARG(double, rotary_scale) = 1.0;  // cos and sin are multiplied by it
  TORCH_ARG(bool, interleaved) = false;   // pairs of neighbours, and not of halves
  // An RMS norm of each head of query and key before that, by norm_offset + its weight.
  TORCH_ARG(bool, qk_norm) = false;
  TORCH_ARG(double, norm_eps) = 1e-6;
  TORCH_ARG(double, norm_offset) = 0.0;
  TORCH_ARG(bool, sinks) = false;  // learned
  TORCH_ARG(bool, gate) = false;   // the heads' output times the sigmoid of a projection
  TORCH_ARG(double, dropout) = 0.0;
  TORCH_ARG(bool, bias) = false;
};

// Keys and values of one layer, [B, Hkv, S_max, D], and lengths [B], int64: how many each row has.
// A call puts a tensor with L more in the place of lengths. With block_table and scales the tensors
// are as in qkv/kvcache.h. rotary: cos and sin of the places that calls have met, [2, places or
// more, R / 2], which they make themselves where the operator of the cache rotates.
struct KvCache {
  at::Tensor keys, values, lengths, block_table, k_scale, v_scale, rotary;
};

// The layer of qkv.nn.SelfAttention in Python, with its parameters: qkv_proj, o_proj, q_norm and
// k_norm [D], sinks [H].
class QKV_API SelfAttentionImpl : public torch::nn::Cloneable<SelfAttentionImpl> {
 public:
  SelfAttentionImpl(int64_t embed_dim, int64_t num_heads)
      : SelfAttentionImpl(SelfAttentionOptions(embed_dim, num_heads)) {}
  // `scores`: what else the scores are made with (window_size, scale, softcap; is_causal(false) of
  // an encoder). attn_mask, dropout_p, enable_gqa and sinks in it are not used; bias, spans,
  // alibi_slopes and score_program do not go with a cache. Throws c10::Error where sizes do not
  // fit.
  explicit SelfAttentionImpl(const SelfAttentionOptions& options,
                             const AttentionOptions& scores = AttentionOptions().is_causal(true));

  // x [B, L, E] -> [B, L, E]. mask: broadcastable to [B, H, L, S], bool, true = may attend, or
  // floating, added to the scores; S is L, or with a cache at least the longest row with x
  // appended. cache: keys and values of x are appended to it, without gradients and dropout. Throws
  // c10::Error, naming the argument.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& mask = {}, KvCache* cache = nullptr);

  // An empty one, of the parameters' dtype.
  KvCache new_cache(int64_t batch, int64_t length) const;

  void reset() override;

  SelfAttentionOptions options;
  AttentionOptions scores;

  // The rows of qkv_proj.weight [(H + 2 Hkv) D, E] are W_Q, W_K and W_V, and with gate H D more.
  torch::nn::Linear qkv_proj = nullptr, o_proj = nullptr;
  at::Tensor q_norm, k_norm, sinks;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())},
                           {2, torch::nn::AnyValue(static_cast<KvCache*>(nullptr))})
};

TORCH_MODULE(SelfAttention);

// The layer of qkv.nn.CrossAttention in Python, with its parameters: q_proj, kv_proj, o_proj,
// q_norm and k_norm [D], sinks [H].
class QKV_API CrossAttentionImpl : public torch::nn::Cloneable<CrossAttentionImpl> {
 public:
  // options: without a rotation. context_dim: C, the width of the context. scores: not causal, for
  // queries have no places among the keys of a context. Throws c10::Error where sizes do not fit.
  CrossAttentionImpl(const SelfAttentionOptions& options, int64_t context_dim,
                     const AttentionOptions& scores = {});

  // x [B, L, E], context [B, S, C] -> [B, L, E]. mask: as of SelfAttention. cache: what new_cache
  // made of a context, which is then left undefined; without gradients and dropout. Throws
  // c10::Error, naming the argument.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& context, const at::Tensor& mask = {},
                     const KvCache* cache = nullptr);

  // Keys and values of a context, for many calls; and key and value, [B, Hkv, S, D], of one.
  KvCache new_cache(const at::Tensor& context);
  std::tuple<at::Tensor, at::Tensor> project(const at::Tensor& context);

  void reset() override;

  SelfAttentionOptions options;
  int64_t context_dim;
  AttentionOptions scores;

  // The rows of kv_proj.weight [2 Hkv D, C] are W_K and W_V, those of q_proj.weight [H D, E] W_Q,
  // and with gate H D more.
  torch::nn::Linear q_proj = nullptr, kv_proj = nullptr, o_proj = nullptr;
  at::Tensor q_norm, k_norm, sinks;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({2, torch::nn::AnyValue(at::Tensor())},
                           {3, torch::nn::AnyValue(static_cast<const KvCache*>(nullptr))})
};

TORCH_MODULE(CrossAttention);

}  // namespace qkv::nn
