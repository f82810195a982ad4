// The inference paths of nn.MultiheadAttention and nn.TransformerEncoderLayer.
#include <ATen/NestedTensorImpl.h>
#include <ATen/ops/_native_multi_head_attention_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include "ops/linear/linear.h"
#include "qkv/attention.h"
#include "replace/kernels.h"

namespace qkv::replace {
namespace {

// What attends to what. The layers hand over one tensor three times, or, under autocast, three
// casts of it.
struct Inputs {
  const at::Tensor &query, &key, &value;

  bool are_one() const { return query.is_same(key) && query.is_same(value); }
  // Whether all are dense and [B, L, embed_dim], not empty.
  bool are_dense(int64_t embed_dim) const {
    for (const at::Tensor* tensor : {&query, &key, &value})
      if (tensor->is_nested() || tensor->layout() != at::kStrided || !tensor->device().is_cpu() ||
          tensor->scalar_type() != query.scalar_type() || !tensor->sizes().equals(query.sizes()))
        return false;
    return query.dim() == 3 && query.size(2) == embed_dim && query.numel() > 0;
  }
};

// What the inputs are projected with.
struct Layer {
  int64_t embed_dim, heads;
  const at::Tensor &qkv_weight, &qkv_bias, &proj_weight, &proj_bias;

  // Whether the shapes and dtypes are those of a layer for `input` [..., embed_dim].
  bool fits(const at::Tensor& input) const {
    const int64_t e = embed_dim;
    const auto is_like_input = [&](const at::Tensor& tensor) {
      return tensor.defined() && tensor.scalar_type() == input.scalar_type() &&
             tensor.device().is_cpu() && tensor.layout() == at::kStrided;
    };
    return e > 0 && heads > 0 && e % heads == 0 && is_like_input(qkv_weight) &&
           is_like_input(qkv_bias) && is_like_input(proj_weight) && is_like_input(proj_bias) &&
           qkv_weight.sizes().equals({3 * e, e}) && qkv_bias.sizes().equals({3 * e}) &&
           proj_weight.sizes().equals({e, e}) && proj_bias.sizes().equals({e});
  }

  // Inputs [..., rows, embed_dim] to query, key and value, each [..., rows, heads, head dimension].
  std::array<at::Tensor, 3> project(const Inputs& inputs) const {
    const int64_t head_dim = embed_dim / heads;
    if (inputs.are_one()) {
      const at::Tensor all =
          ops::projected(inputs.query, qkv_weight, qkv_bias).unflatten(-1, {3, heads, head_dim});
      return {all.select(-3, 0), all.select(-3, 1), all.select(-3, 2)};
    }
    const auto weights = qkv_weight.chunk(3), biases = qkv_bias.chunk(3);
    const auto one = [&](const at::Tensor& input, int i) {
      return ops::projected(input, weights[i], biases[i]).unflatten(-1, {heads, head_dim});
    };
    return {one(inputs.query, 0), one(inputs.key, 1), one(inputs.value, 2)};
  }

  // From [..., rows, heads, head dimension] to [..., rows, embed_dim].
  at::Tensor merge(const at::Tensor& output) const {
    return ops::projected(output.flatten(-2), proj_weight, proj_bias);
  }
};

// `mask` has what is not to be seen, as numbers other than 0; mask_type says its shape: 0 [L, L],
// 1 [B, L], 2 [B, H, L, L]. True is what may be seen, broadcastable to [B, H, L, L]; undefined if
// the shape is another one.
at::Tensor visible_of(const at::Tensor& mask, std::optional<int64_t> mask_type, int64_t batch,
                      int64_t heads, int64_t length) {
  const at::Tensor visible = mask.to(at::kBool).logical_not();
  if (mask_type == 0 && mask.sizes().equals({length, length})) return visible;
  if (mask_type == 1 && mask.sizes().equals({batch, length}))
    return visible.unsqueeze(1).unsqueeze(1);
  if (mask_type == 2 && mask.sizes().equals({batch, heads, length, length})) return visible;
  return {};
}

using Results = std::optional<std::tuple<at::Tensor, at::Tensor>>;

// Dense inputs; nothing if they are not covered.
Results attend_dense(const Layer& layer, const Inputs& inputs,
                     const std::optional<at::Tensor>& mask, std::optional<int64_t> mask_type,
                     bool need_weights, bool average_weights) {
  if (!inputs.are_dense(layer.embed_dim)) return {};
  AttentionOptions options;
  if (mask) {
    const at::Tensor visible =
        visible_of(*mask, mask_type, inputs.query.size(0), layer.heads, inputs.query.size(1));
    if (!visible.defined()) return {};
    options.attn_mask(visible);
  }
  auto [query, key, value] = layer.project(inputs);
  for (at::Tensor* tensor : {&query, &key, &value}) *tensor = tensor->transpose(1, 2);
  at::Tensor output, weights;
  if (need_weights) {
    const auto reduce = average_weights ? std::optional<std::string_view>("heads") : std::nullopt;
    std::tie(output, weights) = attention_with_weights(query, key, value, options, reduce);
  } else {
    output = qkv::attention(query, key, value, options);
  }
  return std::tuple(layer.merge(output.transpose(1, 2)), weights);
}

// [N + 1]: where each item of a nested tensor begins, in rows of its buffer, and where the last
// ends.
at::Tensor beginnings(const at::Tensor& nested_sizes) {
  const at::Tensor lengths = nested_sizes.select(1, 0);
  return at::cat({at::zeros({1}, lengths.options()), lengths.cumsum(0)});
}

// A nested tensor of items [L, embed_dim], which lie one after the other: packed documents. Nothing
// if it is not covered.
Results attend_nested(const Layer& layer, const at::Tensor& input) {
  const auto* nested = at::native::get_nested_tensor_impl(input);
  const at::Tensor& sizes = nested->get_nested_sizes();
  if (sizes.dim() != 2 || sizes.size(1) != 2 || !input.is_contiguous() || input.numel() == 0 ||
      !sizes.select(1, 1).eq(layer.embed_dim).all().item<bool>())
    return {};
  const at::Tensor rows =
      nested->get_buffer().narrow(0, 0, input.numel()).view({-1, layer.embed_dim});
  const auto [query, key, value] = layer.project({rows, rows, rows});
  const at::Tensor output = std::get<0>(varlen_attention(query, key, value, beginnings(sizes)));
  const at::Tensor merged = layer.merge(output);
  return std::tuple(at::detail::make_tensor<at::native::NestedTensorImpl>(merged.view(-1), sizes),
                    at::Tensor());
}

std::tuple<at::Tensor, at::Tensor> multi_head_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, int64_t embed_dim,
    int64_t num_head, const at::Tensor& qkv_weight, const at::Tensor& qkv_bias,
    const at::Tensor& proj_weight, const at::Tensor& proj_bias,
    const std::optional<at::Tensor>& mask, bool need_weights, bool average_attn_weights,
    std::optional<int64_t> mask_type) {
  const Layer layer{embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias};
  const Inputs inputs{query, key, value};
  Outcome outcome = outcome_of(query);
  Results results;
  if (outcome == Outcome::taken) {
    outcome = query.is_nested() ? Outcome::nested : Outcome::refused;
    if (layer.fits(query) && !query.is_nested()) {
      results = attend_dense(layer, inputs, mask, mask_type, need_weights, average_attn_weights);
    } else if (layer.fits(query) && inputs.are_one() && !mask && !need_weights) {
      results = attend_nested(layer, query);
    }
    if (results) outcome = Outcome::taken;
  }
  count(Function::multi_head, outcome);
  if (results) return *std::move(results);
  return at::native::native_multi_head_attention_cpu(
      query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias, mask,
      need_weights, average_attn_weights, mask_type);
}

}  // namespace

torch::CppFunction multi_head_kernel() {
  return torch::CppFunction(TORCH_FN(multi_head_attention));
}

}  // namespace qkv::replace
