#include <ATen/ATen.h>
#include <torch/utils.h>

#include <algorithm>
#include <limits>

#include "call/autocast.h"
#include "call/unknown_sizes.h"
#include "ops/linear/linear.h"
#include "qkv/kvcache.h"
#include "qkv/nn.h"
#include "qkv/rotate.h"

namespace qkv::nn {
namespace {

using at::Tensor;

// What tables and norms of a query are in.
at::ScalarType wide(const Tensor& query) {
  return at::promote_types(query.scalar_type(), at::kFloat);
}

// cos and sin of positions [...], [2, ..., R / 2]. Angles are float64, so that far positions keep
// their digits.
Tensor tables(const SelfAttentionOptions& options, const Tensor& positions, const Tensor& query) {
  const Tensor angles = positions.unsqueeze(-1) * options.frequencies()->to(at::kDouble);
  const Tensor cos_sin = at::stack({angles.cos(), angles.sin()}).mul(options.rotary_scale());
  return cos_sin.to(query.options().dtype(wide(query)));  // which may be on meta
}

// How many keys the longest row has.
int64_t longest(const KvCache& cache) {
  return cache.lengths.numel() ? cache.lengths.max().item<int64_t>() : 0;
}

// cos and sin of all places of a cache's rows with query's behind, which the cache keeps.
const Tensor& tables_of_places(const SelfAttentionOptions& options, KvCache& cache,
                               const Tensor& query) {
  Tensor& kept = cache.rotary;
  // The operator refuses lengths that no row can have, and a table that is no matrix.
  const int64_t blocks = cache.block_table.defined() ? cache.block_table.numel() : 1;
  const int64_t most = std::clamp<int64_t>(longest(cache), 0, blocks * cache.keys.size(2));
  const int64_t places = most + query.size(2), have = kept.defined() ? kept.size(1) : 0;
  // Without any place there are none of them yet; and a layer may have got another dtype.
  if (!kept.defined() || have < places || kept.scalar_type() != wide(query))
    kept = tables(options, at::arange(std::max(places, 2 * have)), query);
  return kept;
}

// Query and key with an RMS norm of each head, where there is a weight of one, and then the
// rotation to `positions`, of no pairs without frequencies: rounded once.
std::tuple<Tensor, Tensor> turned(const SelfAttentionOptions& options, const Tensor& query,
                                  const Tensor& key, const Tensor& q_norm, const Tensor& k_norm,
                                  const Tensor& positions = {}) {
  const Tensor cos_sin = options.frequencies()
                             ? tables(options, positions, query)
                             : query.new_zeros({2, query.size(2), 0}, wide(query));
  RotateOptions rotation;
  rotation.interleaved(options.interleaved()).eps(options.norm_eps());
  const auto weight = [&](const Tensor& norm) {
    return norm.to(wide(query)) + options.norm_offset();
  };
  if (q_norm.defined()) rotation.query_weight(weight(q_norm));
  if (k_norm.defined()) rotation.key_weight(weight(k_norm));
  return rotate(query, key, cos_sin[0], cos_sin[1], rotation);
}

std::string shape_of(const Tensor& x) {
  return x.defined() ? c10::str(x.sizes()) : "an undefined tensor";
}

std::optional<Tensor> if_defined(const Tensor& x) {
  return x.defined() ? std::optional(x) : std::nullopt;
}

Tensor projected(const torch::nn::Linear& layer, const Tensor& x) {
  return ops::projected(x, layer->weight, if_defined(layer->bias));
}

// Every head of a product, [B, heads, L, D], of x [B, L, width], which the caller has as
// `argument`.
Tensor heads(const char* name, const torch::nn::Linear& layer, const char* argument,
             const Tensor& x, int64_t width, int64_t D) {
  TORCH_CHECK(x.defined() && x.dim() == 3 && x.size(2) == width, name, ": ", argument, " is ",
              shape_of(x), ", but [B, ", *argument == 'x' ? "L, " : "S, ", width, "] is expected");
  return projected(layer, x).unflatten(-1, {-1, D}).transpose(1, 2);
}

SelfAttentionOptions checked(const char* name, SelfAttentionOptions options) {
  const int64_t E = options.embed_dim(), H = options.num_heads(), Hkv = options.num_kv_heads();
  TORCH_CHECK_VALUE(E > 0 && H > 0, name, ": embed_dim is ", E, " and num_heads ", H,
                    ", but 1 or more is expected");
  TORCH_CHECK_VALUE(Hkv > 0 && H % Hkv == 0, name, ": num_kv_heads is ", Hkv,
                    ", but a divisor of num_heads, ", H, ", is expected");
  TORCH_CHECK_VALUE(options.head_dim().value_or(1) > 0, name, ": head_dim is ", *options.head_dim(),
                    ", but 1 or more is expected");
  TORCH_CHECK_VALUE(options.head_dim() || E % H == 0, name, ": embed_dim is ", E,
                    ", but a multiple of num_heads, ", H, ", is expected without head_dim");
  if (!options.head_dim()) options.head_dim(E / H);
  const auto& frequencies = options.frequencies();
  TORCH_CHECK_VALUE(!frequencies || (frequencies->defined() && frequencies->dim() == 1 &&
                                     2 * frequencies->numel() <= *options.head_dim()),
                    name, ": frequencies are ", shape_of(frequencies.value_or(Tensor())),
                    ", but [R / 2] is expected, of an R up to head_dim, ", *options.head_dim());
  return options;
}

torch::nn::Linear projection(const SelfAttentionOptions& options, int64_t from, int64_t to) {
  return torch::nn::Linear(torch::nn::LinearOptions(from, to).bias(options.bias()));
}

// What every layer has behind its heads, and beside them.
template <typename Layer>
void reset_others(Layer& layer) {
  const SelfAttentionOptions& o = layer.options;
  const int64_t H = o.num_heads(), D = *o.head_dim();
  layer.o_proj = layer.register_module("o_proj", projection(o, H * D, o.embed_dim()));
  const auto constant = [&](const char* name, int64_t size, double number, bool exists) {
    return layer.register_parameter(name, exists ? at::ones({size}).mul_(number) : Tensor(),
                                    exists);
  };
  layer.q_norm = constant("q_norm", D, 1 - o.norm_offset(), o.qk_norm());
  layer.k_norm = constant("k_norm", D, 1 - o.norm_offset(), o.qk_norm());
  layer.sinks = constant("sinks", H, 0, o.sinks());
}

// Throws c10::Error unless a mask goes with this query and so many new keys. The operators, which
// have it under other names, would speak of those.
void check_mask(const char* name, const Tensor& mask, const Tensor& query, int64_t added,
                const KvCache* cache) {
  TORCH_CHECK(is_mask_type(mask.scalar_type(), query.scalar_type()), name, ": mask is ",
              mask.scalar_type(), ", but Bool (true = may attend), Float or the dtype of the ",
              "projected query, ", query.scalar_type(), ", is expected");
  at::DimVector whole(query.sizes().slice(0, 3));
  whole.push_back(!cache ? added : mask.dim() ? mask.size(-1) : 1);
  TORCH_CHECK(expands_to<int64_t>(mask.sizes(), whole), name, ": mask is ", mask.sizes(),
              ", but what broadcasts to ", at::IntArrayRef(whole), " is expected");
  const int64_t keys = cache && whole.back() != 1 ? longest(*cache) + added : 0;
  TORCH_CHECK(whole.back() >= keys, name, ": mask is ", mask.sizes(),
              ", but a number for each of the longest row's ", keys, " keys is expected");
}

// Throws c10::Error unless a layer can read sizes and lengths of a cache of so many rows.
void check_cache(const char* name, const KvCache& cache, int64_t rows) {
  TORCH_CHECK(cache.keys.defined() && cache.keys.dim() == 4, name, ": cache.keys is ",
              shape_of(cache.keys), ", but what new_cache makes is expected");
  TORCH_CHECK(cache.lengths.defined() && cache.lengths.sizes().equals({rows}), name,
              ": cache.lengths is ", shape_of(cache.lengths), ", but [", rows,
              "] is expected, a number for each row of x");
}

// A mask beside a cache, which is added to the scores. Autocast does not cast it, but float32 goes
// with any query.
Tensor added_to_cached(const Tensor& mask, const Tensor& query) {
  if (mask.scalar_type() == at::kBool)
    return at::where(mask, at::scalar_tensor(0, at::kFloat),
                     at::scalar_tensor(-std::numeric_limits<float>::infinity(), at::kFloat));
  return mask.scalar_type() == query.scalar_type() ? mask : mask.to(at::kFloat);
}

// The layer's output. To a cache, key and value are appended if there are any, and `call` says how
// they are rotated; `gate` has no heads where there is none.
template <typename Layer>
Tensor attended(const char* name, Layer& layer, const Tensor& query,
                const std::optional<Tensor>& key, const std::optional<Tensor>& value,
                const Tensor& gate, const Tensor& mask, const KvCache* cache,
                KvCacheOptions call = {}) {
  const double dropout = layer.is_training() ? layer.options.dropout() : 0.0;
  if (mask.defined()) check_mask(name, mask, query, key ? key->size(2) : 0, cache);
  Tensor output;
  if (cache) {
    TORCH_CHECK(dropout == 0, name, ": dropout is ", dropout,
                ", but 0 is expected with a cache, or a layer in eval mode");
    const AttentionOptions& scores = layer.scores;
    const auto is_given = [](const std::optional<Tensor>& x) { return x && x->defined(); };
    TORCH_CHECK(!is_given(scores.bias()) && !is_given(scores.spans()) &&
                    !is_given(scores.alibi_slopes()) && scores.score_program().empty(),
                name, ": scores has bias, spans, alibi_slopes or score_program, but none of these ",
                "is expected with a cache");
    if (mask.defined()) call.bias(added_to_cached(mask, query));
    call.cache_seqlens(cache->lengths).block_table(if_defined(cache->block_table));
    call.k_scale(if_defined(cache->k_scale)).v_scale(if_defined(cache->v_scale));
    call.score_tables(scores.score_tables()).score_indices(scores.score_indices());
    call.softmax_scale(scores.scale()).causal(scores.is_causal());
    call.window_size(scores.window_size()).softcap(scores.softcap());
    call.sinks(if_defined(layer.sinks));
    output =
        std::get<0>(attention_with_kvcache(query, cache->keys, cache->values, key, value, call));
  } else {
    AttentionOptions call = layer.scores;
    call.attn_mask(if_defined(mask)).sinks(if_defined(layer.sinks)).enable_gqa(true);
    output = attention(query, *key, *value, call.dropout_p(dropout));
  }
  if (gate.size(1)) output = output * gate.sigmoid();
  return projected(layer.o_proj, output.transpose(1, 2).flatten(2));
}

Tensor normed(const Tensor& x, const Tensor& weight, const SelfAttentionOptions& options) {
  return weight.defined() ? std::get<0>(turned(options, x, x.slice(1, 0, 0), weight, {})) : x;
}

}  // namespace

Tensor rotary_frequencies(int64_t R, double base) {
  TORCH_CHECK_VALUE(R > 0 && R % 2 == 0, "rotary_frequencies: R is ", R,
                    ", but an even number from 2 on is expected");
  TORCH_CHECK_VALUE(base > 0, "rotary_frequencies: base is ", base,
                    ", but a positive number is expected");
  return at::pow(base, -at::arange(0, R, 2, at::kDouble) / double(R));
}

SelfAttentionImpl::SelfAttentionImpl(const SelfAttentionOptions& options,
                                     const AttentionOptions& scores)
    : options(checked("SelfAttention", options)), scores(scores) {
  reset();
}

void SelfAttentionImpl::reset() {
  const int64_t heads = options.num_heads() * (options.gate() ? 2 : 1) + 2 * options.num_kv_heads();
  qkv_proj = register_module("qkv_proj",
                             projection(options, options.embed_dim(), heads * *options.head_dim()));
  reset_others(*this);
}

Tensor SelfAttentionImpl::forward(const Tensor& x, const Tensor& mask, KvCache* cache) {
  const int64_t H = options.num_heads(), Hkv = options.num_kv_heads(), D = *options.head_dim();
  const Tensor all = heads("SelfAttention", qkv_proj, "x", x, options.embed_dim(), D);
  Tensor query = all.slice(1, 0, H), key = all.slice(1, H, H + Hkv);
  const Tensor value = all.slice(1, H + Hkv, H + 2 * Hkv);

  KvCacheOptions call;
  if (cache) check_cache("SelfAttention", *cache, x.size(0));
  if (cache && options.frequencies() && !options.qk_norm() && scores.is_causal()) {
    // The cache's operator turns query and key itself, to the same bits in less time.
    const Tensor& cos_sin = tables_of_places(options, *cache, query);
    call.rotary_cos(cos_sin[0]).rotary_sin(cos_sin[1]).rotary_interleaved(options.interleaved());
  } else if (options.frequencies() || options.qk_norm()) {
    Tensor positions = at::arange(x.size(1));
    if (cache) positions = cache->lengths.unsqueeze(-1) + positions;
    std::tie(query, key) = turned(options, query, key, q_norm, k_norm, positions);
  }

  const Tensor output = attended("SelfAttention", *this, query, key, value,
                                 all.slice(1, H + 2 * Hkv), mask, cache, std::move(call));
  if (cache) cache->lengths = cache->lengths + x.size(1);
  return output;
}

KvCache SelfAttentionImpl::new_cache(int64_t batch, int64_t length) const {
  const auto zeros = [&] {
    return at::zeros({batch, options.num_kv_heads(), length, *options.head_dim()},
                     o_proj->weight.scalar_type());
  };
  return {zeros(), zeros(), at::zeros({batch}, at::kLong), {}, {}, {}, {}};
}

CrossAttentionImpl::CrossAttentionImpl(const SelfAttentionOptions& options, int64_t context_dim,
                                       const AttentionOptions& scores)
    : options(checked("CrossAttention", options)), context_dim(context_dim), scores(scores) {
  TORCH_CHECK_VALUE(context_dim > 0, "CrossAttention: context_dim is ", context_dim,
                    ", but 1 or more is expected");
  TORCH_CHECK_VALUE(!options.frequencies(),
                    "CrossAttention: frequencies are given, but none are expected");
  TORCH_CHECK_VALUE(!scores.is_causal(),
                    "CrossAttention: is_causal is true, but false is expected");
  reset();
}

void CrossAttentionImpl::reset() {
  const int64_t H = options.num_heads(), Hkv = options.num_kv_heads(), D = *options.head_dim();
  const int64_t rows = H * D * (options.gate() ? 2 : 1);
  q_proj = register_module("q_proj", projection(options, options.embed_dim(), rows));
  kv_proj = register_module("kv_proj", projection(options, context_dim, 2 * Hkv * D));
  reset_others(*this);
}

std::tuple<Tensor, Tensor> CrossAttentionImpl::project(const Tensor& context) {
  const int64_t Hkv = options.num_kv_heads(), D = *options.head_dim();
  const Tensor all = heads("CrossAttention", kv_proj, "context", context, context_dim, D);
  return {normed(all.slice(1, 0, Hkv), k_norm, options), all.slice(1, Hkv)};
}

Tensor CrossAttentionImpl::forward(const Tensor& x, const Tensor& context, const Tensor& mask,
                                   const KvCache* cache) {
  const int64_t H = options.num_heads();
  const Tensor all =
      heads("CrossAttention", q_proj, "x", x, options.embed_dim(), *options.head_dim());
  TORCH_CHECK(!cache || !context.defined(), "CrossAttention: context and cache are given, but an ",
              "undefined context is expected beside a cache, which was made of one");
  std::optional<Tensor> key, value;
  if (cache) {
    check_cache("CrossAttention", *cache, x.size(0));
  } else {
    std::tie(key, value) = project(context);
    TORCH_CHECK(context.size(0) == x.size(0), "CrossAttention: context is ", context.sizes(),
                ", but [", x.size(0), ", S, ", context_dim, "] is expected");
  }
  const Tensor query = normed(all.slice(1, 0, H), q_norm, options);
  return attended("CrossAttention", *this, query, key, value, all.slice(1, H), mask, cache);
}

KvCache CrossAttentionImpl::new_cache(const Tensor& context) {
  const torch::NoGradGuard no_grad;
  const auto [key, value] = project(context);
  const Tensor lengths = at::full({key.size(0)}, key.size(2), at::kLong);
  return {key.contiguous(), value.contiguous(), lengths, {}, {}, {}, {}};
}

}  // namespace qkv::nn
