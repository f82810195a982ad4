// What every kernel of an operator checks first, so that the CPU and Meta
// kernels raise the same errors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "ops.h"

namespace qkv {

// The sizes of a valid call. T: int64_t, or SymInt in the Meta kernels.
//
// A tensor's dimensions are [batch..., head, row, column]; those that it lacks
// on the left have size 1. Heads and batch dimensions are broadcast.
template <class T>
struct Sizes {
  c10::SmallVector<T, 4> batch;
  bool has_heads = false;  // false: query, key and value are all [row, column]
  T heads = 1;             // H
  T key_heads = 1;         // divide H
  T value_heads = 1;
  T seqlen_q = 0;    // L
  T seqlen_k = 0;    // S
  T head_dim = 0;    // D
  T head_dim_v = 0;  // Dv

  c10::SmallVector<T, 6> output() const { return shape(seqlen_q, head_dim_v); }  // [..., H, L, Dv]
  c10::SmallVector<T, 6> scores() const { return shape(seqlen_q, seqlen_k); }    // [..., H, L, S]
  c10::SmallVector<T, 6> lse() const;                                            // [..., H, L]

 private:
  c10::SmallVector<T, 6> shape(const T& rows, const T& columns) const;
};

// Both throw c10::Error for a call that cannot be computed.
template <class T>
Sizes<T> check(const Forward& call);
template <class T>
Sizes<T> check(const Backward& call);

// The parts of it that need no sizes. That the tensors are dense and on one device, which is all
// that torch's own attention needs to be checked for:
void check_tensors(const Forward& call);
void check_tensors(const Backward& call);
// That the device, dtypes and options are valid, and implemented. The Autograd kernel
// checks this first, because FakeTensor swallows the text of a NotImplementedError.
void check_supported(const Forward& call);

template <class T>
c10::ArrayRef<T> sizes_of(const at::Tensor& tensor) {
  if constexpr (std::is_same_v<T, int64_t>) {
    return tensor.sizes();
  } else {
    return tensor.sym_sizes();
  }
}

template <class T>
c10::ArrayRef<T> strides_of(const at::Tensor& tensor) {
  if constexpr (std::is_same_v<T, int64_t>) {
    return tensor.strides();
  } else {
    return tensor.sym_strides();
  }
}

}  // namespace qkv
