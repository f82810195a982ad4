// The projections of layers: torch.nn.functional.linear, by whoever makes it fastest.
//
// torch multiplies float32 by MKL, which on CPUs of AMD runs code for AVX2; oneDNN, which torch
// carries for convolutions and bfloat16, has AVX-512 there as well. Of few rows, as in a step of
// decoding, the time is that of reading the weight from memory, at which the core library is better
// than either. Who is faster is a table of CPUs (products.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace qkv::ops {

// input [..., K], weight [N, K], bias [N] -> [..., N], as at::linear has it, with its derivatives
// and errors. What is not plain tensors on the CPU, and whatever runs under autocast, torch.func,
// forward mode, a Python mode or a tracer, is at::linear.
at::Tensor projected(const at::Tensor& input, const at::Tensor& weight,
                     const std::optional<at::Tensor>& bias);

}  // namespace qkv::ops
