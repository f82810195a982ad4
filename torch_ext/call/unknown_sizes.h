// What is asked about sizes. In the Meta kernels one may be known only when the program runs, such
// as that of x[mask] within torch.compile, and comparing it by == is an error there.
#pragma once

#include <c10/core/SymInt.h>
#include <c10/util/ArrayRef.h>

#include <algorithm>

namespace qkv {

inline bool is_true(bool known) { return known; }
inline bool is_true(const c10::SymBool& asked) { return TORCH_GUARD_OR_FALSE(asked); }
inline bool must_be(bool known) { return known; }
inline bool must_be(const c10::SymBool& asked) { return asked.expect_true(__FILE__, __LINE__); }

inline bool equals(int64_t a, int64_t b) { return a == b; }
inline c10::SymBool equals(const c10::SymInt& a, const c10::SymInt& b) { return a.sym_eq(b); }
inline bool is_above(int64_t a, int64_t b) { return a > b; }
inline c10::SymBool is_above(const c10::SymInt& a, const c10::SymInt& b) { return a.sym_gt(b); }

// A size as a factor of the strides of the dimensions around it.
inline int64_t at_least_one(int64_t size) { return std::max<int64_t>(size, 1); }
inline c10::SymInt at_least_one(const c10::SymInt& size) {
  return is_true(is_above(size, 1)) ? size : size.max(1);
}

// Whether a size is 1, and broadcasts. As everywhere in torch, one that is not known is not.
template <class T>
bool is_one(const T& size) {
  return is_true(equals(size, T(1)));
}

// Whether sizes are equal, as they have to be. Of those that are not known yet the program checks
// it as soon as they are.
template <class T>
bool are_equal(const T& a, const T& b) {
  return must_be(equals(a, b));
}
template <class T>
bool are_equal(c10::ArrayRef<T> a, c10::ArrayRef<T> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const T& x, const T& y) { return are_equal(x, y); });
}

// Whether `total` can be cut into so many equal parts, as it has to be. Nothing is 0 parts.
template <class T>
bool divides(const T& parts, const T& total) {
  return is_true(equals(parts, T(0))) ? are_equal(total, T(0)) : are_equal(T(total % parts), T(0));
}

template <class T>
bool is_one_or(const T& size, const T& expected) {
  return is_one(size) || are_equal(size, expected);
}

// Whether a tensor of such sizes can be expanded to others, as it has to be.
template <class T>
bool expands_to(c10::ArrayRef<T> sizes, c10::ArrayRef<T> to) {
  if (sizes.size() > to.size()) return false;
  to = to.slice(to.size() - sizes.size());
  return std::equal(sizes.begin(), sizes.end(), to.begin(), is_one_or<T>);
}

}  // namespace qkv
