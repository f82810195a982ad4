// Finds one head of one batch item in a strided tensor.
#pragma once

#include "attention.h"

namespace qkv {

// The offset of element [batch, head, 0, 0], in elements; `batch` is the flat index of all batch
// dimensions.
inline int64_t plane_offset(const Problem& problem, const Strides& strides, int64_t batch,
                            int64_t head) {
  // Divisions are avoided where they would change nothing: one takes 10 to 20 cycles, and a small
  // plane is done in 2000.
  if (strides.head_repeat > 1) head /= strides.head_repeat;
  int64_t offset = head * strides.head;
  for (int d = problem.batch_rank - 1; d > 0; --d) {
    offset += (batch % problem.batch_sizes[d]) * strides.batch[d];
    batch /= problem.batch_sizes[d];
  }
  return problem.batch_rank > 0 ? offset + batch * strides.batch[0] : offset;
}

// The element [batch, head, 0, 0] of a tensor; null if the tensor is.
template <class T>
const T* plane(const Problem& problem, const Input& input, int64_t batch, int64_t head) {
  if (!input.data) return nullptr;
  return static_cast<const T*>(input.data) + plane_offset(problem, input.strides, batch, head);
}

template <class T>
T* plane(const Problem& problem, const Output& output, int64_t batch, int64_t head) {
  if (!output.data) return nullptr;
  return static_cast<T*>(output.data) + plane_offset(problem, output.strides, batch, head);
}

}  // namespace qkv
