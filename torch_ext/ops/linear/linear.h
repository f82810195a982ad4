// The projections of layers: torch.nn.functional.linear, by the faster of torch's two libraries.
//
// torch multiplies float32 by MKL, which on CPUs of AMD runs code for AVX2; oneDNN, which torch
// carries for convolutions and bfloat16, has AVX-512 there as well. Which of them is faster is a
// table of CPUs on which both were measured (fast_onednn.h), never a measurement at run time, so
// that the same program has the same bits whenever it runs on the same CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace qkv::ops {

// input [..., K], weight [N, K], bias [N] -> [..., N], as at::linear has it, with its derivatives
// and errors. oneDNN has plain dense float32 tensors on the CPU; all else, and whatever runs under
// autocast, torch.func, forward mode, a Python mode or a tracer, is at::linear.
at::Tensor projected(const at::Tensor& input, const at::Tensor& weight,
                     const std::optional<at::Tensor>& bias);

}  // namespace qkv::ops
