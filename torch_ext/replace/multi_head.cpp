// The inference paths of nn.MultiheadAttention and nn.TransformerEncoderLayer.
#include <ATen/ATen.h>
#include <ATen/NestedTensorImpl.h>
#include <ATen/ops/_native_multi_head_attention_native.h>

#include "ops/linear/multi_head.h"
#include "qkv/attention.h"
#include "replace/kernels.h"

namespace qkv::replace {
namespace {

using ops::Inputs;
using ops::MultiHead;

bool are_one(const Inputs& inputs) {
  const auto& [query, key, value] = inputs;
  return query.is_same(key) && query.is_same(value);
}

// Whether all are dense and [B, L, embed_dim], not empty.
bool are_dense(const Inputs& inputs, int64_t embed_dim) {
  const at::Tensor& query = inputs[0];
  for (const at::Tensor& tensor : inputs)
    if (tensor.is_nested() || tensor.layout() != at::kStrided || !tensor.device().is_cpu() ||
        tensor.scalar_type() != query.scalar_type() || !tensor.sizes().equals(query.sizes()))
      return false;
  return query.dim() == 3 && query.size(2) == embed_dim && query.numel() > 0;
}

// Whether the shapes and dtypes are those of a layer of width `e` for `input` [..., e].
bool fits(const MultiHead& layer, int64_t e, const at::Tensor& input) {
  const auto is_like_input = [&](const at::Tensor& tensor, at::IntArrayRef sizes) {
    return tensor.defined() && tensor.scalar_type() == input.scalar_type() &&
           tensor.device().is_cpu() && tensor.layout() == at::kStrided &&
           tensor.sizes().equals(sizes);
  };
  return e > 0 && layer.heads > 0 && e % layer.heads == 0 &&
         is_like_input(layer.in_weights[0], {3 * e, e}) && is_like_input(*layer.in_bias, {3 * e}) &&
         is_like_input(layer.out_weight, {e, e}) && is_like_input(*layer.out_bias, {e});
}

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
Results attend_dense(const MultiHead& layer, int64_t embed_dim, const Inputs& inputs,
                     const std::optional<at::Tensor>& mask, std::optional<int64_t> mask_type,
                     bool need_weights, bool average_weights) {
  if (!are_dense(inputs, embed_dim)) return {};
  AttentionOptions options;
  if (mask) {
    const at::Tensor visible =
        visible_of(*mask, mask_type, inputs[0].size(0), layer.heads, inputs[0].size(1));
    if (!visible.defined()) return {};
    options.attn_mask(visible);
  }
  return layer.attend(layer.project(inputs, 1), 1, need_weights, average_weights, options);
}

// [N + 1]: where each item of a nested tensor begins, in rows of its buffer, and where the last
// ends.
at::Tensor beginnings(const at::Tensor& nested_sizes) {
  const at::Tensor lengths = nested_sizes.select(1, 0);
  return at::cat({at::zeros({1}, lengths.options()), lengths.cumsum(0)});
}

// A nested tensor of items [L, embed_dim], which lie one after the other: packed documents. Nothing
// if it is not covered.
Results attend_nested(const MultiHead& layer, int64_t embed_dim, const at::Tensor& input) {
  const auto* nested = at::native::get_nested_tensor_impl(input);
  const at::Tensor& sizes = nested->get_nested_sizes();
  if (sizes.dim() != 2 || sizes.size(1) != 2 || !input.is_contiguous() || input.numel() == 0 ||
      !sizes.select(1, 1).eq(embed_dim).all().item<bool>())
    return {};
  const at::Tensor rows = nested->get_buffer().narrow(0, 0, input.numel()).view({-1, embed_dim});
  Inputs heads = layer.project({rows, rows, rows}, 0);
  for (at::Tensor& tensor : heads) tensor = tensor.transpose(0, 1);
  const auto& [query, key, value] = heads;
  const at::Tensor output = std::get<0>(varlen_attention(query, key, value, beginnings(sizes)));
  const at::Tensor merged = layer.merge(output.transpose(0, 1), 0);
  return std::tuple(at::detail::make_tensor<at::native::NestedTensorImpl>(merged.view(-1), sizes),
                    at::Tensor());
}

std::tuple<at::Tensor, at::Tensor> multi_head_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, int64_t embed_dim,
    int64_t num_head, const at::Tensor& qkv_weight, const at::Tensor& qkv_bias,
    const at::Tensor& proj_weight, const at::Tensor& proj_bias,
    const std::optional<at::Tensor>& mask, bool need_weights, bool average_attn_weights,
    std::optional<int64_t> mask_type) {
  const MultiHead layer{num_head, qkv_weight, qkv_bias, proj_weight, proj_bias};
  // The layers hand over one tensor three times, or, under autocast, three casts of it.
  const Inputs inputs{query, key, value};
  Outcome outcome = outcome_of(query);
  Results results;
  if (outcome == Outcome::taken) {
    outcome = query.is_nested() ? Outcome::nested : Outcome::refused;
    const bool is_covered = fits(layer, embed_dim, query);
    if (is_covered && !query.is_nested()) {
      results = attend_dense(layer, embed_dim, inputs, mask, mask_type, need_weights,
                             average_attn_weights);
    } else if (is_covered && are_one(inputs) && !mask && !need_weights) {
      results = attend_nested(layer, embed_dim, query);
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
