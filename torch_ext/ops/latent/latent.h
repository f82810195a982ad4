// What qkv::latent_attention and qkv::latent_attention_with_kvcache have in common. Both are made
// of projections, which are torch's, and attention, each of which brings its derivatives along.
// Their query, key and new_key are query_nope, latents and the latents that a cache is given.
#pragma once

#include "autograd/define.h"
#include "call/check.h"

namespace qkv::ops {

// By the letters of qkv/latent.h. `latents` and `rope_keys` are one tensor where both are rows.
struct LatentSizes {
  c10::SymInt L, S, N, R, C, Dv;
};

// Throw c10::Error for tensors that do not fit together: queries and weights, which set all sizes
// but S; and latents [..., 1, S, C] with rotary keys [..., 1, S, R], or without these [..., 1, S,
// C + R], which set S. `leading` are the dimensions that both have before.
LatentSizes check_queries(const Call& call);
void check_latents(const Call& call, Argument latents, c10::SymIntArrayRef leading,
                   LatentSizes& sizes);

// Sets the scale that the expanded keys have, if there is none: that of absorbed ones is wrong.
void set_scale(Call& call, const LatentSizes& sizes);

// Whether absorbing takes fewer multiplications, for each head, unless the call says which way to
// take: it pays with wider products of scores and values for not making keys and values.
bool absorbs(const Call& call, const LatentSizes& sizes);

// [..., 1, S, C + R]: latents and rotary keys in one row.
at::Tensor rows_of(const Call& call, Argument latents);
// [..., H, L, C + R], which are multiplied with rows; [..., H, L, Dv] of what rows made of it.
at::Tensor absorbed_query(const Call& call);
at::Tensor absorbed_output(const Call& call, const at::Tensor& output);

// [..., H, L, N + R], and keys and values [..., H, S, N + R] and [..., H, S, Dv].
at::Tensor whole_query(const Call& call);
std::pair<at::Tensor, at::Tensor> expanded(const Call& call, const at::Tensor& latents,
                                           const at::Tensor& rope_keys);

}  // namespace qkv::ops
