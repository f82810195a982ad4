#include "nn/masks.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace qkv::nn {
namespace {

void check(const char* name, const at::Tensor& mask, const std::vector<at::DimVector>& shapes) {
  TORCH_CHECK(mask.scalar_type() == at::kBool || mask.is_floating_point(),
              "MultiheadAttention: ", name, " is ", mask.scalar_type(),
              ", but Bool (true = hidden) or a floating type is expected");
  const bool fits = std::any_of(shapes.begin(), shapes.end(), [&](const at::DimVector& shape) {
    return mask.sizes() == at::IntArrayRef(shape);
  });
  TORCH_CHECK(fits, "MultiheadAttention: ", name, " is ", mask.sizes(), ", but ",
              at::IntArrayRef(shapes[0]), shapes.size() > 1 ? " or " : "",
              shapes.size() > 1 ? c10::str(at::IntArrayRef(shapes[1])) : "", " is expected");
}

// Floating: -inf where a boolean mask hides.
at::Tensor added(const at::Tensor& mask) {
  if (mask.scalar_type() != at::kBool) return mask;
  return at::zeros_like(mask, mask.options().dtype(at::kFloat))
      .masked_fill(mask, -std::numeric_limits<double>::infinity());
}

}  // namespace

void set_masks(AttentionOptions& options, const at::Tensor& key_padding_mask,
               const at::Tensor& attn_mask, const LayerSizes& sizes, int64_t more_keys) {
  const auto [B, H, L, S] = sizes;
  std::vector<at::Tensor> masks;  // what is boolean first: the operator's bias must be floating
  const auto add = [&](at::Tensor mask) {
    if (more_keys) mask = at::constant_pad_nd(mask, {0, more_keys});
    masks.insert(mask.scalar_type() == at::kBool ? masks.begin() : masks.end(), mask);
  };
  if (attn_mask.defined()) {
    check("attn_mask", attn_mask, {{L, S}, {B * H, L, S}});
    add(attn_mask.dim() == 3 ? attn_mask.unflatten(0, {B, H}) : attn_mask);
  }
  if (key_padding_mask.defined()) {
    check("key_padding_mask", key_padding_mask, {{B, S}});
    add(key_padding_mask.unsqueeze(1).unsqueeze(1));
  }
  // The operator takes two. With a bias of the layer's own one is left for both.
  if (masks.size() == 2 && options.bias()) masks.assign(1, added(masks[0]).add(added(masks[1])));
  if (!masks.empty())
    options.attn_mask(masks[0].scalar_type() == at::kBool ? masks[0].logical_not() : masks[0]);
  if (masks.size() == 2) options.bias(added(masks[1]));
}

}  // namespace qkv::nn
