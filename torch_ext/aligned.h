// The kernels read whole elements. Tensors on foreign memory, from frombuffer,
// may begin between two: those are copied.
#pragma once

#include <ATen/ops/clone.h>

#include "call.h"

namespace qkv {

inline bool is_aligned(const at::Tensor& tensor) {
  return !tensor.defined() ||
         reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % tensor.element_size() == 0;
}

inline at::Tensor aligned(const at::Tensor& tensor) {
  return is_aligned(tensor) ? tensor : tensor.clone();
}

inline bool is_aligned(const Forward& call) {
  for (const at::Tensor* tensor : call.tensors)
    if (!is_aligned(*tensor)) return false;
  return true;
}

// `call` with copies of the tensors that need one, as long as this lives.
class AlignedForward {
 public:
  explicit AlignedForward(const Forward& call) : call_(call) {
    for (int i = 0; i < kArguments; ++i) {
      tensors_[i] = aligned(*call.tensors[i]);
      call_.tensors[i] = &tensors_[i];
    }
  }
  AlignedForward(const AlignedForward&) = delete;
  const Forward& operator*() const { return call_; }

 private:
  std::array<at::Tensor, kArguments> tensors_;
  Forward call_;
};

}  // namespace qkv
