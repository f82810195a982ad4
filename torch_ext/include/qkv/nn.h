// torch::nn::MultiheadAttention on qkv::attention.
//
//   qkv::nn::MultiheadAttention layer(torch::nn::MultiheadAttentionOptions(512, 8).dropout(0.1));
//   auto [output, weights] = layer(query, key, value);
//
// Options, names of the parameters, initial values, arguments and results are those of torch's
// class, so archives that torch::save has written of one load into the other. What differs:
// attention is fused; boolean masks of both kinds and masks [B * H, L, S] are taken, as in Python;
// value may have another width than key; a query with nothing to attend to gets the bias of
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
  // where embed_dim is no multiple of num_heads.
  explicit MultiheadAttentionImpl(const torch::nn::MultiheadAttentionOptions& options,
                                  const AttentionOptions& scores = {});

  // query [L, B, E], key [S, B, kdim], value [S, B, vdim] -> output [L, B, E] and the weights, as
  // they are after dropout: [B, L, S], the mean over the heads, or with average_attn_weights =
  // false [B, H, L, S]; undefined without need_weights, which is faster and needs no memory that
  // grows with L * S. S counts the keys that add_bias_kv and add_zero_attn add.
  //
  // key_padding_mask [B, S], attn_mask [L, S] or [B * H, L, S]: bool, true hides the key, or
  // floating, added to the scores. Differentiable as qkv::attention is. Throws
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

}  // namespace qkv::nn
