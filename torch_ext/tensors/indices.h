// Reads int32 or int64 tensors, whatever their strides, without a copy.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstring>

namespace qkv {

class Indices {
 public:
  // One or two dimensions. `tensor` must outlive this.
  explicit Indices(const at::Tensor& tensor)
      : data_(static_cast<const char*>(tensor.const_data_ptr())),
        wide_(tensor.scalar_type() == at::kLong),
        row_(tensor.dim() == 2 ? tensor.strides()[0] : 0),
        column_(tensor.strides()[tensor.dim() - 1]) {}

  int64_t operator[](int64_t i) const { return at(0, i); }
  int64_t at(int64_t row, int64_t column) const {
    const int64_t i = row * row_ + column * column_;
    return wide_ ? read<int64_t>(i) : read<int32_t>(i);
  }

 private:
  template <class T>
  T read(int64_t i) const {
    T x;  // foreign memory may begin anywhere
    std::memcpy(&x, data_ + i * int64_t(sizeof(T)), sizeof(T));
    return x;
  }

  const char* data_;
  bool wide_;
  int64_t row_, column_;
};

}  // namespace qkv
