// A small causal language model whose attention is qkv::nn::MultiheadAttention. train.cpp trains
// it, and generate.cpp lets it write, with a cache of keys and values.
//
// Its texts are a word of different letters, '>', the word's letters in alphabetical order, and
// '.': "query>eqruy." It learns to write what follows '>'. What matters for that is which letters
// are in a word and not where, so the model needs no embedding of positions.
#pragma once

#include <qkv/kvcache.h>
#include <qkv/nn.h>
#include <torch/torch.h>

namespace nn = torch::nn;
using torch::Tensor;

// Tokens: 0 to 25 are the letters.
constexpr int64_t kLetters = 26, kSort = 26, kEnd = 27, kTokens = 28;
constexpr int64_t kLongestWord = 12;
constexpr int64_t kWidth = 32, kHeads = 4, kLayers = 2;

// The keys and values that the layers have computed for B texts.
struct Cache {
  // The longest text: a word, '>', the same letters once more, and '.'.
  static constexpr int64_t kRoom = 2 * kLongestWord + 2;

  explicit Cache(int64_t texts)
      : keys(torch::zeros({kLayers, texts, kHeads, kRoom, kWidth / kHeads})),
        values(torch::zeros_like(keys)),
        lengths(torch::zeros({texts}, torch::kLong)) {}

  Tensor keys, values;  // [kLayers, B, kHeads, kRoom, kWidth / kHeads]
  Tensor lengths;       // [B] how many tokens of each text are in the cache
};

struct BlockImpl : nn::Module {
  explicit BlockImpl(int64_t layer) : layer(layer) {
    // Every option of qkv::attention may stand beside torch's; is_causal hides later tokens.
    attention = register_module(
        "attention", qkv::nn::MultiheadAttention(nn::MultiheadAttentionOptions(kWidth, kHeads),
                                                 qkv::AttentionOptions().is_causal(true)));
    attention_norm =
        register_module("attention_norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    mlp_norm = register_module("mlp_norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    mlp = register_module("mlp", nn::Sequential(nn::Linear(kWidth, 4 * kWidth), nn::GELU(),
                                                nn::Linear(4 * kWidth, kWidth)));
  }

  // x [L, B, kWidth], tokens first, as torch::nn::MultiheadAttention has them.
  Tensor forward(Tensor x, const Cache* cache) {
    const Tensor normed = attention_norm(x);
    x = x + (cache ? attend_to_cache(normed, *cache) : attend(normed));
    return x + mlp->forward(mlp_norm(x));
  }

 private:
  Tensor attend(const Tensor& x) {
    // Without weights the call is faster, and its memory does not grow with the square of L.
    const auto [output, weights] = attention(x, x, x, Tensor(), /*need_weights=*/false);
    return output;
  }

  // The same with the layer's own parameters, but for the keys and values, which come from the
  // cache. Those of x are appended to it first.
  Tensor attend_to_cache(const Tensor& x, const Cache& cache) {
    const Tensor projected =
        nn::functional::linear(x, attention->in_proj_weight, attention->in_proj_bias);
    // [L, B, 3 * kWidth] becomes query, key and value, three views [B, kHeads, L, kWidth / kHeads].
    const std::vector<Tensor> heads =
        projected.unflatten(-1, {3, kHeads, -1}).permute({2, 1, 3, 0, 4}).unbind();
    const auto [output, lse] = qkv::attention_with_kvcache(
        heads[0], cache.keys[layer], cache.values[layer], heads[1], heads[2],
        qkv::KvCacheOptions().cache_seqlens(cache.lengths).causal(true));
    return attention->out_proj(output.permute({2, 0, 1, 3}).flatten(2));
  }

  int64_t layer;
  qkv::nn::MultiheadAttention attention{nullptr};
  nn::LayerNorm attention_norm{nullptr}, mlp_norm{nullptr};
  nn::Sequential mlp{nullptr};
};
TORCH_MODULE(Block);

struct LettersImpl : nn::Module {
  LettersImpl() {
    embedding = register_module("embedding", nn::Embedding(kTokens, kWidth));
    blocks = register_module("blocks", nn::ModuleList());
    for (int64_t layer = 0; layer < kLayers; ++layer) blocks->push_back(Block(layer));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    to_logits = register_module("to_logits", nn::Linear(kWidth, kTokens));
  }

  // Tokens [L, B] in, logits [L, B, kTokens] of the token that follows each out.
  Tensor forward(const Tensor& tokens) { return logits(tokens, nullptr); }

  // The same for tokens that follow the texts in the cache, to which they are appended.
  Tensor append(const Tensor& tokens, Cache& cache) {
    const Tensor result = logits(tokens, &cache);
    cache.lengths += tokens.size(0);  // once, after the last layer
    return result;
  }

 private:
  Tensor logits(const Tensor& tokens, const Cache* cache) {
    Tensor x = embedding(tokens);
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x, cache);
    return to_logits(norm(x));
  }

  nn::Embedding embedding{nullptr};
  nn::ModuleList blocks{nullptr};
  nn::LayerNorm norm{nullptr};
  nn::Linear to_logits{nullptr};
};
TORCH_MODULE(Letters);
