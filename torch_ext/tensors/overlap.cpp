// An element lies sum_d i_d * stride_d bytes after the first one, 0 <= i_d < size_d. Two elements
// share memory where the difference of two such sums is a certain number: a search over the
// differences i_d - j_d, from the largest stride to the smallest. What the smaller strides can
// still reach leaves one or two choices at each step, for all but the oddest strides.
#include "tensors/overlap.h"

#include <c10/util/SmallVector.h>

#include <algorithm>

namespace qkv {
namespace {

// An integer between low and high, times stride.
struct Term {
  int64_t stride, low, high;
};

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }
int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b > 0); }

// Whether the terms can add up to `target`. Gives up, with yes, after so many steps.
class Search {
 public:
  void add(Term term) { terms_.push_back(term); }

  bool reaches(int64_t target) {
    std::sort(terms_.begin(), terms_.end(),
              [](const Term& a, const Term& b) { return a.stride > b.stride; });
    merge_equal_strides();
    low_.assign(terms_.size() + 1, 0);
    high_.assign(terms_.size() + 1, 0);
    for (size_t i = terms_.size(); i-- > 0;) {
      low_[i] = low_[i + 1] + terms_[i].low * terms_[i].stride;
      high_[i] = high_[i + 1] + terms_[i].high * terms_[i].stride;
    }
    return reaches(target, 0);
  }

 private:
  bool reaches(int64_t target, size_t i) {
    if (target < low_[i] || target > high_[i]) return false;
    if (i == terms_.size()) return true;
    if (--steps_ < 0) return true;
    const Term& t = terms_[i];
    const int64_t first = std::max(t.low, ceil_div(target - high_[i + 1], t.stride));
    const int64_t last = std::min(t.high, floor_div(target - low_[i + 1], t.stride));
    for (int64_t n = first; n <= last; ++n)
      if (reaches(target - n * t.stride, i + 1)) return true;
    return false;
  }

  void merge_equal_strides() {
    size_t kept = 0;
    for (size_t i = 0; i < terms_.size(); ++i) {
      if (kept > 0 && terms_[kept - 1].stride == terms_[i].stride) {
        terms_[kept - 1].low += terms_[i].low;
        terms_[kept - 1].high += terms_[i].high;
      } else {
        terms_[kept++] = terms_[i];
      }
    }
    terms_.resize(kept);
  }

  c10::SmallVector<Term, 10> terms_;
  c10::SmallVector<int64_t, 11> low_, high_;  // what the terms from i on can reach
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
void add_terms(Search& search, const at::Tensor& tensor, bool negative) {
  const int64_t size = tensor.element_size();
  const auto add = [&](int64_t stride, int64_t n) {
    if (n > 1 && stride > 0) search.add({stride, negative ? 1 - n : 0, negative ? 0 : n - 1});
  };
  for (int64_t d = 0; d < tensor.dim(); ++d) add(tensor.strides()[d] * size, tensor.sizes()[d]);
  add(1, size);  // the bytes of an element
}

}  // namespace

bool overlaps_itself(const at::Tensor& tensor) {
  if (tensor.numel() < 2) return false;
  // Two elements differ in some dimension; in one order or the other the first difference, from the
  // left, is positive.
  for (int64_t first = 0; first < tensor.dim(); ++first) {
    const int64_t n = tensor.sizes()[first], stride = tensor.strides()[first];
    if (n < 2) continue;
    if (stride == 0) return true;
    Search search;
    search.add({stride, 1, n - 1});
    for (int64_t d = first + 1; d < tensor.dim(); ++d) {
      const int64_t m = tensor.sizes()[d];
      if (m > 1 && tensor.strides()[d] > 0) search.add({tensor.strides()[d], 1 - m, m - 1});
    }
    if (search.reaches(0)) return true;
  }
  return false;
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  const auto [a_begin, a_end] = range_of(a);
  const auto [b_begin, b_end] = range_of(b);
  if (a_end <= b_begin || b_end <= a_begin) return false;
  Search search;
  add_terms(search, a, false);
  add_terms(search, b, true);
  return search.reaches(int64_t(b_begin) - int64_t(a_begin));
}

}  // namespace qkv
