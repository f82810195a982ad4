// Rotary position embedding of query and key, each after an RMS norm over its head dimension if it
// has a weight: a part of the public interface (attention.h). Of a row x of D numbers,
//
//   n_d       = x_d * weight_d / sqrt(sum_d x_d^2 / D + eps)     (without a weight: n = x)
//   y_a       = n_a * cos_i - n_b * sin_i                        of pair i of the first R numbers
//   y_b       = n_b * cos_i + n_a * sin_i
//
// and y = n beyond them. Pair i is (i, i + R / 2) or, interleaved, (2 i, 2 i + 1).
#pragma once

#include <array>
#include <cstdint>

#include "common/tensor.h"
#include "export.h"

namespace qkv {

// A tensor in a type of its own.
struct TypedInput : Input {
  DType dtype = DType::f32;
};
struct TypedOutput : Output {
  DType dtype = DType::f32;
};

// Query or key.
struct RotatedTensor {
  int64_t heads = 0;
  Input input;        // [B..., H, L, D]
  TypedInput weight;  // [B..., D] (row unused); null data: there is no norm
  Output output;      // [B..., H, L, D]; of the backward pass, the gradient of `input`
};

struct Rotation : Batch {
  DType dtype = DType::f32;  // of input and output
  int64_t seqlen = 0;        // L
  int64_t head_dim = 0;      // D
  int64_t rotary_pairs = 0;  // R / 2
  bool is_interleaved = false;
  double eps = 0;
  TypedInput cos, sin;  // [B..., L, R / 2] (head unused)
  // Of each batch item, which row of cos and sin its first position has; null: 0. Then these have
  // as many rows as that takes.
  const int64_t* offsets = nullptr;
  std::array<RotatedTensor, 2> tensors;
  int num_threads = 1;
};

// Outputs with null data are not wanted. Those whose batch strides are 0 get the sum over that
// dimension.
struct RotationGradients {
  std::array<Input, 2> grad_output;        // as Rotation::tensors
  std::array<TypedOutput, 2> grad_weight;  // [B..., D]
  TypedOutput grad_cos, grad_sin;          // [B..., L, R / 2]; with offsets not wanted

  bool wants_tables() const { return grad_cos.data || grad_sin.data; }
};

// Everything is computed in compute_type() and rounded once. The results have the same bits
// whatever num_threads is. Both throw std::bad_alloc if there is no memory for their workspace.
QKV_CORE_API void rotation_forward(const Rotation& rotation);
QKV_CORE_API void rotation_backward(const Rotation& rotation, const RotationGradients& gradients);

// An item of either pass: positions [begin, end) of one batch item, all heads. The memory of the
// last three is in compute_type() and double; null: not wanted.
struct RotationItem {
  int64_t batch, begin, end;
  const RotationGradients* gradients = nullptr;   // null: the forward pass
  void *cos_sums = nullptr, *sin_sums = nullptr;  // [end - begin, R / 2], over the heads
  std::array<double*, 2> weight_sums{};           // [D], over heads and positions
};

// The most positions of an item: their cos and sin, in f32 and for R = 128, are half of a
// first-level cache of 32 KiB, in which they stay while the heads go by.
constexpr int64_t kRotationBlock = 32;

}  // namespace qkv
