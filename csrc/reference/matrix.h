// [rows, cols] of one batch item and head of a tensor of any type, read and
// written as double.
#pragma once

#include "attention.h"
#include "half.h"
#include "strides.h"

namespace qkv::reference {

enum class Type { f32, f64, bf16, f16, byte, int64 };

inline Type type_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return Type::f32;
    case DType::f64:
      return Type::f64;
    case DType::bf16:
      return Type::bf16;
    case DType::f16:
      return Type::f16;
  }
  return Type::f64;
}
inline Type type_of(MaskType mask) {
  switch (mask) {
    case MaskType::f32:
      return Type::f32;
    case MaskType::bf16:
      return Type::bf16;
    case MaskType::f16:
      return Type::f16;
    case MaskType::boolean:
      return Type::byte;
    default:
      return Type::f64;
  }
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

  // Key or value: its rows may lie in pages.
  Matrix(const Problem& p, const Input& t, int64_t page_stride, int64_t b, int64_t h)
      : Matrix(p, t, type_of(p.dtype), b, h) {
    pages_ = p.pages;
    page_stride_ = page_stride;
  }

  explicit operator bool() const { return data_ != nullptr; }

  double operator()(int64_t r, int64_t c) const {
    const int64_t at = offset(r, c);
    switch (type_) {
      case Type::f32:
        return static_cast<const float*>(data_)[at];
      case Type::f64:
        return static_cast<const double*>(data_)[at];
      case Type::bf16:
        return widen(static_cast<const BFloat16*>(data_)[at]);
      case Type::f16:
        return widen(static_cast<const Float16*>(data_)[at]);
      case Type::byte:
        return static_cast<const uint8_t*>(data_)[at];
      case Type::int64:
        break;
    }
    return double(static_cast<const int64_t*>(data_)[at]);
  }

  // No-ops where the output is not wanted.
  void set(int64_t r, int64_t c, double x) const {
    if (!data_) return;
    const int64_t at = offset(r, c);
    if (type_ == Type::f32) static_cast<float*>(data_)[at] = float(x);
    if (type_ == Type::f64) static_cast<double*>(data_)[at] = x;
    if (type_ == Type::bf16) static_cast<BFloat16*>(data_)[at] = narrow<BFloat16>(float(x));
    if (type_ == Type::f16) static_cast<Float16*>(data_)[at] = narrow<Float16>(float(x));
    if (type_ == Type::byte) static_cast<uint8_t*>(data_)[at] = uint8_t(x);
    if (type_ == Type::int64) static_cast<int64_t*>(data_)[at] = int64_t(x);
  }
  void add(int64_t r, int64_t c, double x) const {
    if (data_) set(r, c, (*this)(r, c) + x);
  }

 private:
  int64_t offset(int64_t r, int64_t c) const {
    if (!pages_.table) return first_ + r * row_ + c * col_;
    return first_ + pages_.table[r / pages_.size] * page_stride_ + r % pages_.size * row_ +
           c * col_;
  }

  Type type_;
  Data* data_;
  int64_t first_, row_, col_;  // offset of [0, 0] and strides, in elements
  Pages pages_;
  int64_t page_stride_ = 0;
};

using InputMatrix = Matrix<const void>;
using OutputMatrix = Matrix<void>;

}  // namespace qkv::reference
