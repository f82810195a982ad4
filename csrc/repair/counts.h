// How products leave out hidden pairs where a factor is NaN or infinite. A pair here, and in all of
// repair/, is one row and one key; it is hidden if the row may not see the key.
//
// The weight of a hidden pair is exactly 0, but 0 * NaN and 0 * inf are NaN. So a product with
// numbers that are not finite is separated into two. The first has 0 in their place. The second
// counts them: each number has one of the codes below, each pair one of the marks, and the sum of
// mark * code says what the numbers would have added to an element of the result.
//
// Such a sum has at most kKeyBlock or kGradRows terms, and every term is 0 or a power of two. So it
// is exact while it is less than kNaNCode, and from there on it only grows.
#pragma once

#include "kernels/operands/operands.h"
#include "kernels/simd/halves.h"

namespace qkv::QKV_ISA {

// The code of a number is 0 if it is finite, else one of these.
constexpr int kInfinityCode = 1, kMinusInfinityCode = 1 << 8, kNaNCode = 1 << 16;

// The mark of a pair is 0 if it is hidden; kPositive if its weight is more than 0, so that an
// infinity stays what it is; and kMakesNaN if its weight is 0 or NaN, which make NaN of an
// infinity.
constexpr int kPositive = 1, kMakesNaN = 1 << 16;

static_assert(kMinusInfinityCode * kMinusInfinityCode <= kNaNCode);

// Whether infinities are told from NaN. They are kept as what they are in values and grad_output,
// which are multiplied by weights. They count as NaN in keys and queries: there a number that is
// not finite makes the weights 0 or NaN, and makes NaN of the gradients of scores, or of what is
// multiplied by them.
enum class Infinities { kept, as_nan };

// The code of each lane of x.
template <Infinities infinities, class T>
QKV_INLINE Vec<T> code_of(Vec<T> x) {
  Vec<T> code = splat(T(kNaNCode));
  if constexpr (infinities == Infinities::kept) {
    const Vec<T> infinite = x > 0 ? splat(T(kInfinityCode)) : splat(T(kMinusInfinityCode));
    code = x == x ? infinite : code;
  }
  return x - x == 0 ? Vec<T>{} : code;
}

// The number that a sum of mark * code stands for: NaN, an infinity, or -0 for a sum of 0, since -0
// changes no number that it is added to.
template <Infinities infinities, class T>
QKV_INLINE Vec<T> meaning_of(Vec<T> sum) {
  const Vec<T> nan = splat(std::numeric_limits<T>::quiet_NaN());
  if (infinities == Infinities::as_nan) return sum > 0 ? nan : splat(T(-0.));
  const IntVec<T> count = __builtin_convertvector(-max<T>(splat(T(-kNaNCode)), -sum), IntVec<T>);
  const IntVec<T> positive = count & (kMinusInfinityCode - 1);
  Vec<T> x = positive != 0 ? splat(kInfinity<T>) : splat(T(-0.));
  x -= count != positive ? splat(kInfinity<T>) : Vec<T>{};  // inf - inf is NaN
  return count >= kNaNCode ? nan : x;
}

// to [count] += the numbers that sums [count] stand for. `count` is a multiple of kLanes<T>.
template <Infinities infinities, class T>
void add_counted(int64_t count, const T* sums, T* to) {
  for (int64_t i = 0; i < count; i += kLanes<T>)
    store(to + i, load(to + i) + meaning_of<infinities, T>(load(sums + i)));
}

// Whether sums [count] are all NaN, so that nothing that is added changes them. `count` is a
// multiple of kLanes<T>.
template <class T>
bool all_nan(const T* sums, int64_t count) {
  if (count > 0 && sums[0] == sums[0]) return false;  // as most often, without a loop
  Vec<T> numbers{};
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    const Vec<T> x = load(sums + i);
    numbers += x == x ? splat(T(1)) : Vec<T>{};
  }
  return !any_nonzero<T>(numbers);
}

// Separates numbers [count]: codes [count] become their codes, and of x [count] those that are not
// finite become 0. Returns whether there are any. `count` is a multiple of kLanes<T>. Codes may be
// bf16, for products of pairs of it: it holds codes and marks exactly, and f32 their sums.
template <Infinities infinities, class E, class C, class T = Compute<E>>
bool separate_numbers(int64_t count, E* x, C* codes) {
  Vec<T> all{};
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    const Vec<T> number = load_wide(x + i), code = code_of<infinities, T>(number);
    store_narrow(x + i, code == 0 ? number : Vec<T>{});
    store_narrow(codes + i, code);
    all += code;
  }
  return any_nonzero<T>(all);
}

// Whether the numbers of `count` vectors, `step` elements apart, are all finite: 0 times a finite
// number is 0, and 0 times any other is NaN.
template <class E, class T = Compute<E>>
QKV_INLINE bool vectors_are_finite(const E* x, int64_t count, int64_t step) {
  constexpr int kSums = 4;  // independent sums, so that no addition waits for the one before
  Vec<T> zero[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    QKV_UNROLL
    for (int s = 0; s < kSums; ++s) zero[s] += load_wide(x + (i + s) * step) * T(0);
  }
  for (; i < count; ++i) zero[0] += load_wide(x + i * step) * T(0);
  return !any_nonzero<T>(zero[0] + zero[1] + (zero[2] + zero[3]));
}

// Whether numbers [count] are. `count` is a multiple of kLanes<T>.
template <class E, class T = Compute<E>>
bool all_finite(const E* x, int64_t count) {
  return vectors_are_finite(x, count / kLanes<T>, kLanes<T>);
}

// Whether rows [rows, dim] of any strides are all finite.
template <class E, class T = Compute<E>>
bool all_finite(Matrix<E> m, int64_t rows, int64_t dim) {
  if (m.col != 1 && m.row == 1) return all_finite(Matrix<E>{m.data, m.col, 1}, dim, rows);
  if (m.col == 1 && m.row == dim &&
      rows > 1)  // one piece, of which only the end is looked at singly
    return all_finite(Matrix<E>{m.data, rows * dim, 1}, 1, rows * dim);
  const int64_t whole = m.col == 1 ? dim / kLanes<T> * kLanes<T> : 0;
  T zero = 0;
  for (int64_t r = 0; r < rows; ++r) {
    if (!all_finite(m.data + r * m.row, whole)) return false;
    for (int64_t d = whole; d < dim; ++d) zero += widen(m.data[r * m.row + d * m.col]) * T(0);
  }
  return zero == 0;
}

}  // namespace qkv::QKV_ISA
