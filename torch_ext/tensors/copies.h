// Calls with copies of tensors that the kernels cannot take as they are.
#pragma once

#include "call/check.h"

namespace qkv {

// The kernels read whole elements. Tensors on foreign memory, from frombuffer, may begin between
// two: those are copied.
inline bool is_aligned(const at::Tensor& tensor) {
  return !tensor.defined() ||
         reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % tensor.element_size() == 0;
}

inline at::Tensor aligned(const at::Tensor& tensor) {
  return is_aligned(tensor) ? tensor : tensor.clone();
}

inline bool is_aligned(const Call& call) {
  bool all = true;
  call.op->for_each_tensor([&](Argument argument) { all = all && is_aligned(call[argument]); });
  return all;
}

// bfloat16 and float16 as float32, all others as they are.
inline at::Tensor widened(const at::Tensor& tensor) {
  return tensor.defined() && at::isReducedFloatingType(tensor.scalar_type()) ? tensor.to(at::kFloat)
                                                                             : tensor;
}

// `call` with copy(tensor) for each tensor, as long as this lives.
class CopiedCall {
 public:
  CopiedCall(const Call& call, at::Tensor (*copy)(const at::Tensor&)) : call_(call) {
    for (int i = 0; i < arg::count; ++i) {
      tensors_[i] = copy(*call.tensors[i]);
      call_.tensors[i] = &tensors_[i];
    }
  }
  CopiedCall(const CopiedCall&) = delete;
  const Call& operator*() const { return call_; }

  // Sets the arguments that `op` returns to what it returns for this call.
  void recompute(const Operator& op) {
    const Tensors results = op.kernels.cpu(call_.as(op));
    for (size_t i = 0; i < results.size(); ++i) tensors_[op.results[i]] = results[i];
  }

 private:
  std::array<at::Tensor, arg::count> tensors_;
  Call call_;
};

}  // namespace qkv
