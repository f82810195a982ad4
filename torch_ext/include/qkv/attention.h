// Attention for LibTorch programs, with gradients; no Python needed.
//
//   auto output = qkv::attention(query, key, value, qkv::AttentionOptions().is_causal(true));
//
// Link qkv::qkv from find_package(qkv); `python -c "import qkv; print(qkv.cmake_prefix_path)"`
// says where CMake finds it.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "qkv/export.h"
#include "qkv/options.h"

namespace qkv {

// dropout(softmax(scale * query @ key^T + mask)) @ value.
//
//   query [..., H, L, D], key [..., H, S, D], value [..., H, S, Dv] -> [..., H, L, Dv]
//
// float32, float64, bfloat16 or float16, all the same, on the CPU. For bfloat16 and float16 scores,
// softmax and sums are float32. At least two dimensions; the leading ones broadcast. Any strides;
// nothing is copied. The output is laid out in memory like query. A row with nothing to attend to
// is 0. Differentiable with respect to query, key, value and the floating tensors among the
// options: backward, in forward mode and twice, in memory linear in L and S; more often with the
// memory of a few [..., H, L, S]. Throws c10::Error (c10::ValueError for numbers out of range,
// c10::NotImplementedError for what is still to come), naming the argument. Tensors on another
// device go to torch's own attention.
//
// Under autocast for the CPU, all functions here cast query, key, value and attn_mask as torch does
// for its own attention, and nothing else.
QKV_API at::Tensor attention(const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value, const AttentionOptions& options = {});

// attention and, as the second result, the natural logarithm of each row's
// softmax denominator: [..., H, L], contiguous, float64 for float64 and float32 for all others; for
// a row with nothing to attend to the sink, or -inf. Both are differentiable. CPU only.
QKV_API std::tuple<at::Tensor, at::Tensor> attention_with_lse(const at::Tensor& query,
                                                              const at::Tensor& key,
                                                              const at::Tensor& value,
                                                              const AttentionOptions& options = {});

// attention_with_lse and, as the third and fourth result, how both change when query, key, value
// and the tensors among the options change along `tangents`: the derivative in that direction, from
// one pass over the keys. output [..., H, L, Dv], logsumexp [..., H, L], and their tangents of the
// same shapes and dtypes; 0 where a row has nothing to attend to. With dropout all four are those
// of the same kept weights. Forward mode through attention computes the same. The results can be
// differentiated in turn, in linear memory, too. Autocast casts the tangents of what it casts. CPU
// only.
QKV_API std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_jvp(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const AttentionTangents& tangents, const AttentionOptions& options = {});

// Attention over N documents of any lengths, one after the other without padding; each attends to
// itself alone.
//
//   query [T, H, D], key [Tk, H, D], value [Tk, H, Dv] -> output [T, H, Dv], logsumexp [H, T]
//
// cu_seq_q [N + 1], int32 or int64, from 0 on, not falling: document n has queries cu_seq_q[n] up
// to cu_seq_q[n + 1]. cu_seq_k, likewise for key and value; cu_seq_q when not set. seqused_k [N]:
// only the first seqused_k[n] keys of document n take part. All positions, L and S are those of the
// document; alibi_slopes and sinks are [H] or [N, H]; attn_mask and bias
// broadcast to [N, H, L, S], by positions within a document, where L and S are at least those of
// the longest one. Queries outside all documents: output 0, logsumexp -inf. Differentiable as
// attention is, but no more than twice.
//
// block_table [N, M], int32 or int64: key [blocks, block size, Hkv, D] and value lie in blocks;
// document n has the first seqused_k[n] keys of the blocks block_table[n]. Needs seqused_k;
// the numbers in cu_seq_k are not used; no gradients, no dropout, no attn_mask. key and value may
// be int8 there, with k_scale and v_scale, float32 [1], [Hkv] or [blocks, block size, Hkv]: what
// their numbers are multiplied by. See qkv/kvcache.h, too.
QKV_API std::tuple<at::Tensor, at::Tensor> varlen_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& cu_seq_q, const std::optional<at::Tensor>& cu_seq_k = std::nullopt,
    const AttentionOptions& options = {}, const std::optional<at::Tensor>& seqused_k = std::nullopt,
    const std::optional<at::Tensor>& block_table = std::nullopt,
    const std::optional<at::Tensor>& k_scale = std::nullopt,
    const std::optional<at::Tensor>& v_scale = std::nullopt);

// The weights that attention gives to the values, after all options, dropout included:
// [..., H, L, S]. reduce = "heads": their mean over heads, [..., L, S]; "queries": their sum over
// queries, [..., H, S], how much each key was attended to. Those are made without the [..., H, L,
// S] weights. In query's dtype; bfloat16 and float16 are added up in float32. Differentiable as
// attention is, but twice and in forward mode with the memory of a few [..., H, L, S].
QKV_API at::Tensor attention_weights(const at::Tensor& query, const at::Tensor& key,
                                     const AttentionOptions& options = {},
                                     std::optional<std::string_view> reduce = std::nullopt);

// attention and, as the second result, the weights that it has averaged the values with: those of
// attention_weights, with the same dropout, from the same pass. Both are differentiable.
QKV_API std::tuple<at::Tensor, at::Tensor> attention_with_weights(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const AttentionOptions& options = {}, std::optional<std::string_view> reduce = std::nullopt);

// The value at the key with the largest score, the first if several have it, instead of the
// average: [..., H, L, Dv]; and which key that is: int64 [..., H, L]. A row with nothing to attend
// to: output 0, index -1. Throws c10::Error where dropout_p or sinks is set. The gradient goes to
// the values that were chosen, and in forward mode their change is the output's; with
// straight_through, all other tensors have the derivatives that attention's output would have.
// There are no second derivatives. CPU only.
QKV_API std::tuple<at::Tensor, at::Tensor> hard_attention(const at::Tensor& query,
                                                          const at::Tensor& key,
                                                          const at::Tensor& value,
                                                          const AttentionOptions& options = {},
                                                          bool straight_through = false);

}  // namespace qkv
