// Attention over parts of the keys, put together.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "qkv/export.h"

namespace qkv {

// The attention of the same queries to the keys of all parts, from the results of
// attention_with_lse for each part.
//
//   outputs  n tensors [..., H, L, Dv], of one shape and one floating dtype
//   lses     n tensors [..., H, L], the logarithms of the softmax's denominators
//   -> output [..., H, L, Dv] in that dtype, logsumexp [..., H, L] in that of the lses
//
// weight_p = exp(lse_p - logsumexp), in the dtype of the lses, and output = sum_p weight_p *
// output_p, in the wider one of both dtypes, where logsumexp = log(sum_p exp(lse_p)). A row to
// which no part has anything to attend, lse -inf in all of them, gets output 0, logsumexp -inf and
// gradients 0, as long as no part's output is NaN there: attention gives 0, softmax NaN. Any
// device. Differentiable any number of times, also in forward mode. Throws c10::Error, naming the
// argument, and c10::NotImplementedError where the same bits are asked for on every CPU
// (qkv/reproducible.h).
QKV_API std::tuple<at::Tensor, at::Tensor> merge(at::TensorList outputs, at::TensorList lses);

}  // namespace qkv
