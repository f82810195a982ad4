// An element lies sum_d i_d * stride_d bytes after the first one, 0 <= i_d < size_d. Two elements
// share memory where the difference of two such sums is a certain number: a search over the
// differences i_d - j_d, from the largest stride to the smallest. What the smaller strides can
// still reach leaves one or two choices at each step, for all but the oddest strides.
#include "tensors/overlap.h"

#include <algorithm>
#include <functional>
#include <map>

namespace qkv {
namespace {

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }
int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b > 0); }

// The sums of integers within bounds, each times a stride.
class Sums {
 public:
  void add(int64_t stride, int64_t low, int64_t high) {
    if (stride == 0 || (low == 0 && high == 0)) return;
    Bounds& bounds = terms_[stride];
    bounds.low += low, bounds.high += high;
    all_.low += low * stride, all_.high += high * stride;
  }

  // Whether one of them is `target`. Gives up, with yes, after so many steps.
  bool have(int64_t target) { return have(target, terms_.begin(), all_); }

 private:
  struct Bounds {
    int64_t low = 0, high = 0;
  };
  using Terms = std::map<int64_t, Bounds, std::greater<>>;

  // Of the terms from `term` on, whose sums have these bounds.
  bool have(int64_t target, Terms::const_iterator term, Bounds sums) {
    if (target < sums.low || target > sums.high) return false;
    if (term == terms_.end()) return true;
    if (--steps_ < 0) return true;
    const auto& [stride, bounds] = *term++;
    const Bounds rest = {sums.low - bounds.low * stride, sums.high - bounds.high * stride};
    const int64_t first = std::max(bounds.low, ceil_div(target - rest.high, stride));
    const int64_t last = std::min(bounds.high, floor_div(target - rest.low, stride));
    for (int64_t n = first; n <= last; ++n)
      if (have(target - n * stride, term, rest)) return true;
    return false;
  }

  Terms terms_;
  Bounds all_;
  int64_t steps_ = 100'000;
};

// [begin, end) in bytes.
std::pair<uintptr_t, uintptr_t> range_of(const at::Tensor& tensor) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.sizes()[d] - 1) * tensor.strides()[d];
  return {begin, begin + (last + 1) * tensor.element_size()};
}

// The terms of i_d in `a`, or of -j_d in `b`.
void add_terms(Sums& sums, const at::Tensor& tensor, bool negative) {
  const int64_t size = tensor.element_size();
  const auto add = [&](int64_t stride, int64_t n) {
    sums.add(stride, negative ? 1 - n : 0, negative ? 0 : n - 1);
  };
  for (int64_t d = 0; d < tensor.dim(); ++d) add(tensor.strides()[d] * size, tensor.sizes()[d]);
  add(1, size);  // the bytes of an element
}

}  // namespace

bool overlaps_itself(const at::Tensor& tensor) {
  if (tensor.numel() < 2 || tensor.is_non_overlapping_and_dense()) return false;
  // Two elements differ in some dimension; in one order or the other the first difference, from the
  // left, is positive.
  for (int64_t first = 0; first < tensor.dim(); ++first) {
    const int64_t n = tensor.sizes()[first], stride = tensor.strides()[first];
    if (n < 2) continue;
    if (stride == 0) return true;
    Sums sums;
    sums.add(stride, 1, n - 1);
    for (int64_t d = first + 1; d < tensor.dim(); ++d)
      sums.add(tensor.strides()[d], 1 - tensor.sizes()[d], tensor.sizes()[d] - 1);
    if (sums.have(0)) return true;
  }
  return false;
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  const auto [a_begin, a_end] = range_of(a);
  const auto [b_begin, b_end] = range_of(b);
  if (a_end <= b_begin || b_end <= a_begin) return false;
  Sums sums;
  add_terms(sums, a, false);
  add_terms(sums, b, true);
  return sums.have(int64_t(b_begin) - int64_t(a_begin));
}

bool begins_rows(const at::Tensor& part, const at::Tensor& whole) {
  if (!part.defined() || !whole.defined()) return part.defined() == whole.defined();
  return part.const_data_ptr() == whole.const_data_ptr() && part.strides() == whole.strides() &&
         part.sizes().slice(0, part.dim() - 1) == whole.sizes().slice(0, whole.dim() - 1) &&
         part.sizes().back() <= whole.sizes().back();
}

}  // namespace qkv
