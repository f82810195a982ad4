// What stands in for torch's own kernels while sdpa is replaced. Each hands what it does not cover
// to the kernel that it stands in for, and counts it.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace qkv::replace {

// aten::scaled_dot_product_attention.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& attn_mask, double dropout_p, bool is_causal,
                     std::optional<double> scale, bool enable_gqa);

// aten::_native_multi_head_attention, for dense and for strided nested tensors on the CPU.
std::tuple<at::Tensor, at::Tensor> multi_head_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, int64_t embed_dim,
    int64_t num_head, const at::Tensor& qkv_weight, const at::Tensor& qkv_bias,
    const at::Tensor& proj_weight, const at::Tensor& proj_bias,
    const std::optional<at::Tensor>& mask, bool need_weights, bool average_attn_weights,
    std::optional<int64_t> mask_type);

// The functions of torch that are replaced.
enum class Function : int8_t { attention, multi_head, count };

// Who computes a call: qkv (taken), or torch for one of these reasons.
enum class Outcome : int8_t { taken, elsewhere, no_flash, nested, dtype, refused, count };

// Any thread may call it at any time.
void count(Function function, Outcome outcome);

// What can be said of either by its query: taken, or why torch computes it.
Outcome outcome_of(const at::Tensor& query);

}  // namespace qkv::replace
