// A view [rows, cols] of a tensor of any type: what one batch item and one head have of it. Its
// elements are read and written as double.
#pragma once

#include "attention.h"
#include "common/strides.h"
#include "reference/element.h"

namespace qkv::reference {

// Data is const void for the view of an Input, and void for that of an Output. A view of a tensor
// that the caller did not give, or does not want, is false; it may be written to, which does
// nothing.
template <class Data>
class View {
 public:
  template <class Tensor>
  View(const Problem& p, const Tensor& t, Type type, int64_t b, int64_t h)
      : type_(type),
        data_(t.data),
        first_(plane_offset(p, t.strides, b, h)),
        row_(t.strides.row),
        col_(t.strides.col) {}

  // The view of key or value, whose rows may lie in pages: page n begins n * page_stride elements
  // after the tensor.
  View(const Problem& p, const Input& t, int64_t page_stride, int64_t b, int64_t h)
      : View(p, t, type_of(p.dtype), b, h) {
    pages_ = p.pages;
    page_stride_ = page_stride;
  }

  explicit operator bool() const { return data_ != nullptr; }

  double operator()(int64_t r, int64_t c) const { return read(type_, data_, offset(r, c)); }

  void set(int64_t r, int64_t c, double x) const {
    if (data_) write(type_, data_, offset(r, c), x);
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
  int64_t first_, row_, col_;  // the offset of [0, 0] and the strides, in elements
  Pages pages_;
  int64_t page_stride_ = 0;
};

using InputView = View<const void>;
using OutputView = View<void>;

}  // namespace qkv::reference
