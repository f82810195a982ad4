// tests/reference on tensors: what the operators are held against. It computes in float64 and
// returns query's dtype; torch's autograd differentiates it, once. Dropout takes no part.
#pragma once

#include <torch/autograd.h>
#include <torch/types.h>

#include "qkv/options.h"

namespace qkv::test {

// [..., H, L, Dv] and the logsumexp [..., H, L].
std::tuple<at::Tensor, at::Tensor> reference(const at::Tensor& query, const at::Tensor& key,
                                             const at::Tensor& value,
                                             const AttentionOptions& options = {});

// The weights, [..., H, L, S].
at::Tensor reference_weights(const at::Tensor& query, const at::Tensor& key,
                             const AttentionOptions& options = {});

// The value at the best key, [..., H, L, Dv], differentiable with respect to value alone, and that
// key's number, [..., H, L]. Every query sees a key; sinks take no part.
std::tuple<at::Tensor, at::Tensor> reference_hard(const at::Tensor& query, const at::Tensor& key,
                                                  const at::Tensor& value,
                                                  const AttentionOptions& options = {});

}  // namespace qkv::test
