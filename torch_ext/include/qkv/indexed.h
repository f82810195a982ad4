// Attention of each query to keys that something else has chosen for it: an indexer, as in
// DeepSeek's sparse attention.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "qkv/export.h"
#include "qkv/options.h"

namespace qkv {

// attention_with_lse in which query i sees only the keys indices[i], as if a mask hid all others.
//
//   query [..., H, L, D], key [..., H, S, D], value [..., H, S, Dv],
//   indices [..., L, k] or, for each key head, [..., Hkv, L, k], int32 or int64; L and Hkv may be 1
//   -> output [..., H, L, Dv], logsumexp [..., H, L]
//
// A negative index names no key; one that is named twice counts once; what the options hide stays
// hidden. The time goes with k where S is larger by a few times and all tensors have four
// dimensions: without gradients each query reads its keys; with gradients neighbouring queries
// share those that any of them has. It goes with S in torch.compile and vmap, and with dropout,
// bias, spans, alibi_slopes, a score_program, or a mask that is floating or not the same for all
// heads. Differentiable as attention is. Throws c10::Error, naming the argument, for an index of S
// or more, too. CPU only.
QKV_API std::tuple<at::Tensor, at::Tensor> indexed_attention(const at::Tensor& query,
                                                             const at::Tensor& key,
                                                             const at::Tensor& value,
                                                             const at::Tensor& indices,
                                                             const AttentionOptions& options = {});

}  // namespace qkv
