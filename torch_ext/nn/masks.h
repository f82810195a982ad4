// The masks of torch's multi-head attention, which say what to hide, as options of qkv::attention,
// which say what may be seen.
#pragma once

#include <ATen/core/Tensor.h>

#include "qkv/options.h"

namespace qkv::nn {

// The sizes of one call of a layer: B, H, L and S.
struct LayerSizes {
  int64_t batch, heads, seqlen_q, seqlen_k;
};

// key_padding_mask [B, S], attn_mask [L, S] or [B * H, L, S], bool (true hides) or floating
// (added); either may be undefined. With `more_keys` keys behind the S, which every query sees.
// Throws c10::Error for other shapes and dtypes.
void set_masks(AttentionOptions& options, const at::Tensor& key_padding_mask,
               const at::Tensor& attn_mask, const LayerSizes& sizes, int64_t more_keys);

}  // namespace qkv::nn
