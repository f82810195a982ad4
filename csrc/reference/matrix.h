// [rows, cols] of one batch item and head of a tensor of any type, read and
// written as double.
#pragma once

#include "attention.h"
#include "strides.h"

namespace qkv::reference {

enum class Type { f32, f64, byte, int64 };

inline Type type_of(DType dtype) { return dtype == DType::f32 ? Type::f32 : Type::f64; }
inline Type type_of(MaskType mask) {
  return mask == MaskType::boolean ? Type::byte : mask == MaskType::f32 ? Type::f32 : Type::f64;
}

// Of an Input (Data = const void) or an Output (Data = void).
template <class Data>
class Matrix {
 public:
  template <class Tensor>
  Matrix(const Problem& p, const Tensor& t, Type type, int64_t b, int64_t h)
      : type_(type),
        data_(t.data),
        first_(plane_offset(p, t.strides, b, h)),
        row_(t.strides.row),
        col_(t.strides.col) {}

  explicit operator bool() const { return data_ != nullptr; }

  double operator()(int64_t r, int64_t c) const {
    const int64_t at = first_ + r * row_ + c * col_;
    if (type_ == Type::f32) return static_cast<const float*>(data_)[at];
    if (type_ == Type::f64) return static_cast<const double*>(data_)[at];
    if (type_ == Type::byte) return static_cast<const uint8_t*>(data_)[at];
    return double(static_cast<const int64_t*>(data_)[at]);
  }

  // No-ops where the output is not wanted.
  void set(int64_t r, int64_t c, double x) const {
    if (!data_) return;
    const int64_t at = first_ + r * row_ + c * col_;
    if (type_ == Type::f32) static_cast<float*>(data_)[at] = float(x);
    if (type_ == Type::f64) static_cast<double*>(data_)[at] = x;
    if (type_ == Type::byte) static_cast<uint8_t*>(data_)[at] = uint8_t(x);
    if (type_ == Type::int64) static_cast<int64_t*>(data_)[at] = int64_t(x);
  }
  void add(int64_t r, int64_t c, double x) const {
    if (data_) set(r, c, (*this)(r, c) + x);
  }

 private:
  Type type_;
  Data* data_;
  int64_t first_, row_, col_;  // offset of [0, 0] and strides, in elements
};

using InputMatrix = Matrix<const void>;
using OutputMatrix = Matrix<void>;

}  // namespace qkv::reference
