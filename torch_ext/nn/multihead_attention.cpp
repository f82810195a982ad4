#include <ATen/ATen.h>
#include <torch/nn/modules/activation.h>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "call/autocast.h"
#include "ops/linear/multi_head.h"
#include "qkv/nn.h"

namespace qkv::nn {
namespace {

using at::Tensor;

// `rows`, of which any number fits if it is -1, are called `letter`.
void check(const char* name, const Tensor& x, const char* letter, int64_t rows, int64_t batch,
           int64_t width) {
  TORCH_CHECK(x.defined(), "MultiheadAttention: ", name, " is an undefined tensor");
  TORCH_CHECK(x.dim() == 3 && (rows < 0 || x.size(0) == rows) &&
                  (batch < 0 || x.size(1) == batch) && x.size(2) == width,
              "MultiheadAttention: ", name, " is ", x.sizes(), ", but [",
              rows < 0 ? letter : c10::str(rows), ", ", batch < 0 ? "B" : c10::str(batch), ", ",
              width, "] is expected");
}

// [B, H, S, D] with a row of `bias` [1, 1, E], if there is one, and with a row of zeros behind.
Tensor with_rows(const Tensor& x, const Tensor& bias, bool zeros) {
  std::vector<Tensor> all{x};
  const auto one = x.sizes().vec();
  if (bias.defined())
    all.push_back(bias.view({1, one[1], 1, one[3]}).expand({one[0], one[1], 1, one[3]}));
  if (zeros) all.push_back(x.new_zeros({one[0], one[1], 1, one[3]}));
  return all.size() == 1 ? x : at::cat(all, 2);
}

// dtype: that of the projected query. The operator, which has the mask under another name, would
// speak of that.
void check_mask(const char* name, const Tensor& mask, at::ScalarType dtype,
                const std::vector<at::DimVector>& shapes) {
  TORCH_CHECK(is_mask_type(mask.scalar_type(), dtype), "MultiheadAttention: ", name, " is ",
              mask.scalar_type(),
              ", but Bool (true = hidden), Float or the dtype of the projected query, ", dtype,
              ", is expected");
  const bool fits = std::any_of(shapes.begin(), shapes.end(), [&](const at::DimVector& shape) {
    return mask.sizes() == at::IntArrayRef(shape);
  });
  TORCH_CHECK(fits, "MultiheadAttention: ", name, " is ", mask.sizes(), ", but ",
              at::IntArrayRef(shapes[0]), shapes.size() > 1 ? " or " : "",
              shapes.size() > 1 ? c10::str(at::IntArrayRef(shapes[1])) : "", " is expected");
}

// Floating, and -inf where a boolean mask hides. At least float32: so a bias, which autocast does
// not cast, goes with any query.
Tensor added(const Tensor& mask) {
  if (mask.scalar_type() != at::kBool)
    return mask.to(at::promote_types(mask.scalar_type(), at::kFloat));
  return at::zeros_like(mask, mask.options().dtype(at::kFloat))
      .masked_fill(mask, -std::numeric_limits<double>::infinity());
}

// The masks of torch's multi-head attention, which say what to hide, as options of qkv::attention,
// which say what may be seen: key_padding_mask [B, S], attn_mask [L, S] or [B * H, L, S], bool
// (true hides) or floating (added); either may be undefined. With `more_keys` keys behind the S,
// which every query sees. Throws c10::Error for other shapes and dtypes.
void set_masks(AttentionOptions& options, const Tensor& key_padding_mask, const Tensor& attn_mask,
               at::ScalarType dtype, const std::array<int64_t, 4>& sizes, int64_t more_keys) {
  const auto& [B, H, L, S] = sizes;
  std::vector<Tensor> masks;  // what is boolean first: the operator's bias must be floating
  const auto add = [&](Tensor mask) {
    if (more_keys) mask = at::constant_pad_nd(mask, {0, more_keys});
    masks.insert(mask.scalar_type() == at::kBool ? masks.begin() : masks.end(), mask);
  };
  if (attn_mask.defined()) {
    check_mask("attn_mask", attn_mask, dtype, {{L, S}, {B * H, L, S}});
    add(attn_mask.dim() == 3 ? attn_mask.unflatten(0, {B, H}) : attn_mask);
  }
  if (key_padding_mask.defined()) {
    check_mask("key_padding_mask", key_padding_mask, dtype, {{B, S}});
    add(key_padding_mask.unsqueeze(1).unsqueeze(1));
  }
  // The operator takes two. With a bias of the layer's own one is left for both, which are summed
  // in the type that the operator adds in.
  if (masks.size() == 2 && options.bias())
    masks.assign(1, added(masks[0]).to(at::promote_types(dtype, at::kFloat)).add(added(masks[1])));
  if (!masks.empty())
    options.attn_mask(masks[0].scalar_type() == at::kBool ? masks[0].logical_not() : masks[0]);
  if (masks.size() == 2) options.bias(added(masks[1]));
}

}  // namespace

MultiheadAttentionImpl::MultiheadAttentionImpl(const torch::nn::MultiheadAttentionOptions& options,
                                               const AttentionOptions& scores)
    : options(options), scores(scores) {
  reset();
}

// torch's layer checks the other options and draws the parameters. It divides by num_heads.
void MultiheadAttentionImpl::reset() {
  TORCH_CHECK_VALUE(options.embed_dim() > 0 && options.num_heads() > 0,
                    "MultiheadAttention: embed_dim is ", options.embed_dim(), " and num_heads ",
                    options.num_heads(), ", but 1 or more is expected");
  const bool more_keys = options.add_bias_kv() || options.add_zero_attn();
  TORCH_CHECK_VALUE(
      !more_keys ||
          !(scores.is_causal() || scores.window_size() || tensor_of(scores.spans()).defined() ||
            tensor_of(scores.alibi_slopes()).defined()),
      "MultiheadAttention: scores has is_causal, window_size, spans or alibi_slopes, ",
      "but none of these is expected with add_bias_kv or add_zero_attn, whose keys ",
      "are behind all others; pass an attn_mask");
  const torch::nn::MultiheadAttentionImpl torchs(options);
  const auto take = [this](const char* name, const Tensor& parameter) {
    return register_parameter(name, parameter, parameter.defined());
  };
  in_proj_weight = take("in_proj_weight", torchs.in_proj_weight);
  q_proj_weight = take("q_proj_weight", torchs.q_proj_weight);
  k_proj_weight = take("k_proj_weight", torchs.k_proj_weight);
  v_proj_weight = take("v_proj_weight", torchs.v_proj_weight);
  in_proj_bias = take("in_proj_bias", torchs.in_proj_bias);
  out_proj = register_module("out_proj", torch::nn::Linear(torchs.out_proj));
  bias_k = take("bias_k", torchs.bias_k);
  bias_v = take("bias_v", torchs.bias_v);
}

std::tuple<Tensor, Tensor> MultiheadAttentionImpl::forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& key_padding_mask,
    bool need_weights, const Tensor& attn_mask, bool average_attn_weights) {
  const int64_t E = options.embed_dim(), H = options.num_heads();
  check("query", query, "L", -1, -1, E);
  check("key", key, "S", -1, query.size(1), options.kdim());
  check("value", value, "S", key.size(0), query.size(1), options.vdim());

  const auto given = [](const Tensor& x) { return x.defined() ? std::optional(x) : std::nullopt; };
  const std::array<Tensor, 3> separate{q_proj_weight, k_proj_weight, v_proj_weight};
  const ops::MultiHead layer{
      H, in_proj_weight.defined() ? at::TensorList(in_proj_weight) : at::TensorList(separate),
      given(in_proj_bias), out_proj->weight, given(out_proj->bias)};
  const auto [q, keys, values] = layer.project({query, key, value}, 0);
  const Tensor k = with_rows(keys, bias_k, options.add_zero_attn());
  const Tensor v = with_rows(values, bias_v, options.add_zero_attn());
  AttentionOptions call = scores;
  call.attn_mask(std::nullopt);
  set_masks(call, key_padding_mask, attn_mask, q.scalar_type(),
            {q.size(0), H, q.size(2), key.size(0)}, k.size(2) - key.size(0));
  call.dropout_p(is_training() ? options.dropout() : 0.0).enable_gqa(false);
  return layer.attend({q, k, v}, 0, need_weights, average_attn_weights, call);
}

}  // namespace qkv::nn
