#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/zeros.h>

#include "ops/linear/linear.h"
#include "qkv/kvcache.h"
#include "qkv/nn.h"
#include "qkv/rotate.h"

namespace qkv::nn {
namespace {

using at::Tensor;

// cos and sin of positions [...], [..., R / 2]. Angles are float64, so that far positions keep
// their digits.
std::tuple<Tensor, Tensor> tables(const SelfAttentionOptions& options, const Tensor& positions,
                                  at::ScalarType dtype) {
  const Tensor angles = positions.unsqueeze(-1) * options.frequencies()->to(at::kDouble);
  const auto rounded = [&](const Tensor& x) { return x.mul(options.rotary_scale()).to(dtype); };
  return {rounded(angles.cos()), rounded(angles.sin())};
}

std::optional<Tensor> if_defined(const Tensor& x) {
  return x.defined() ? std::optional(x) : std::nullopt;
}

Tensor projected(const torch::nn::Linear& layer, const Tensor& x) {
  return ops::projected(x, layer->weight, if_defined(layer->bias));
}

}  // namespace

Tensor rotary_frequencies(int64_t R, double base) {
  TORCH_CHECK_VALUE(R > 0 && R % 2 == 0, "rotary_frequencies: R is ", R,
                    ", but an even number from 2 on is expected");
  return at::pow(base, -at::arange(0, R, 2, at::kDouble) / double(R));
}

SelfAttentionImpl::SelfAttentionImpl(const SelfAttentionOptions& options,
                                     const AttentionOptions& scores)
    : options(options), scores(scores) {
  const int64_t E = options.embed_dim(), H = options.num_heads(), Hkv = options.num_kv_heads();
  TORCH_CHECK_VALUE(E > 0 && H > 0, "SelfAttention: embed_dim is ", E, " and num_heads ", H,
                    ", but 1 or more is expected");
  TORCH_CHECK_VALUE(Hkv > 0 && H % Hkv == 0, "SelfAttention: num_kv_heads is ", Hkv,
                    ", but a divisor of num_heads, ", H, ", is expected");
  TORCH_CHECK_VALUE(options.head_dim().value_or(1) > 0, "SelfAttention: head_dim is ",
                    *options.head_dim(), ", but 1 or more is expected");
  TORCH_CHECK_VALUE(options.head_dim() || E % H == 0, "SelfAttention: embed_dim is ", E,
                    ", but a multiple of num_heads, ", H, ", is expected without head_dim");
  if (!options.head_dim()) this->options.head_dim(E / H);
  reset();
}

void SelfAttentionImpl::reset() {
  const int64_t H = options.num_heads(), D = *options.head_dim();
  const int64_t heads = H * (options.gate() ? 2 : 1) + 2 * options.num_kv_heads();
  const auto projection = [&](int64_t from, int64_t to) {
    return torch::nn::Linear(torch::nn::LinearOptions(from, to).bias(options.bias()));
  };
  qkv_proj = register_module("qkv_proj", projection(options.embed_dim(), heads * D));
  o_proj = register_module("o_proj", projection(H * D, options.embed_dim()));
  const auto constant = [&](const char* name, int64_t size, double number, bool exists) {
    return register_parameter(name, exists ? at::ones({size}).mul_(number) : Tensor(), exists);
  };
  q_norm = constant("q_norm", D, 1 - options.norm_offset(), options.qk_norm());
  k_norm = constant("k_norm", D, 1 - options.norm_offset(), options.qk_norm());
  sinks = constant("sinks", H, 0, options.sinks());
}

Tensor SelfAttentionImpl::forward(const Tensor& x, const Tensor& mask, KvCache* cache) {
  const int64_t H = options.num_heads(), Hkv = options.num_kv_heads(), D = *options.head_dim();
  TORCH_CHECK(x.defined() && x.dim() == 3 && x.size(2) == options.embed_dim(),
              "SelfAttention: x is ", x.defined() ? c10::str(x.sizes()) : "an undefined tensor",
              ", but [B, L, ", options.embed_dim(), "] is expected");
  TORCH_CHECK(!cache || !is_training() || options.dropout() == 0, "SelfAttention: dropout is ",
              options.dropout(), ", but 0 is expected with a cache, or a layer in eval mode");
  const Tensor all = projected(qkv_proj, x).unflatten(-1, {-1, D}).transpose(1, 2);
  Tensor query = all.slice(1, 0, H), key = all.slice(1, H, H + Hkv);
  const Tensor value = all.slice(1, H + Hkv, H + 2 * Hkv);

  if (options.frequencies() || options.qk_norm()) {
    const auto dtype = at::promote_types(query.scalar_type(), at::kFloat);
    Tensor positions = at::arange(x.size(1));
    if (cache) positions = cache->lengths.unsqueeze(-1) + positions;
    // Without rotation there are tables of no pairs.
    Tensor cos = at::zeros({x.size(1), 0}, dtype), sin = cos;
    if (options.frequencies()) std::tie(cos, sin) = tables(options, positions, dtype);
    RotateOptions rotation;
    rotation.interleaved(options.interleaved()).eps(options.norm_eps());
    if (options.qk_norm()) {
      rotation.query_weight(q_norm.to(dtype) + options.norm_offset());
      rotation.key_weight(k_norm.to(dtype) + options.norm_offset());
    }
    std::tie(query, key) = rotate(query, key, cos, sin, rotation);
  }

  Tensor output;
  if (cache) {
    KvCacheOptions call;
    call.cache_seqlens(cache->lengths).block_table(if_defined(cache->block_table));
    call.k_scale(if_defined(cache->k_scale)).v_scale(if_defined(cache->v_scale));
    call.softmax_scale(scores.scale()).causal(scores.is_causal()).bias(if_defined(mask));
    call.window_size(scores.window_size()).softcap(scores.softcap()).sinks(if_defined(sinks));
    output =
        std::get<0>(attention_with_kvcache(query, cache->keys, cache->values, key, value, call));
    cache->lengths = cache->lengths + x.size(1);
  } else {
    AttentionOptions call = scores;
    call.attn_mask(if_defined(mask)).sinks(if_defined(sinks)).enable_gqa(true);
    call.dropout_p(is_training() ? options.dropout() : 0.0);
    output = attention(query, key, value, call);
  }
  if (options.gate()) output = output * all.slice(1, H + 2 * Hkv).sigmoid();
  return projected(o_proj, output.transpose(1, 2).flatten(2));
}

KvCache SelfAttentionImpl::new_cache(int64_t batch, int64_t length) const {
  const auto zeros = [&] {
    return at::zeros({batch, options.num_kv_heads(), length, *options.head_dim()},
                     o_proj->weight.scalar_type());
  };
  return {zeros(), zeros(), at::zeros({batch}, at::kLong), {}, {}, {}};
}

}  // namespace qkv::nn
