// Pairs of bf16 that are neighbours along the depth of a product. Some instructions multiply two
// such pairs, number by number, and add both products to an f32. They may take subnormal bf16 for
// 0.
//
// Included only where isa/<name>/vec.h has these two functions:
//   native_dot_pairs(sum, a, b): sum + a.first * b.first + a.second * b.second
//   native_narrow(low, high): f32 to the nearest bf16, those of low, then those of high
#pragma once

// Opened by itself (kernels/simd/vec.h), this header is code for AVX512-BF16, and so are others
// that include it first.
#ifndef QKV_ISA
#include "isa/avx512bf16/vec.h"
#endif

#include "kernels/simd/halves.h"
#include "kernels/simd/vec.h"

namespace qkv::QKV_ISA {

template <>
struct VecTraits<Pair> : VecTraits<Pair, uint32_t> {};

// As many bf16 as there are in kLanes<Pair> pairs.
constexpr int kPairHalves = 2 * kLanes<Pair>;
typedef uint16_t PairHalves __attribute__((vector_size(kVectorBytes)));

constexpr int64_t pairs_in(int64_t halves) { return (halves + 1) / 2; }
// The length of a row of `dim` bf16 that is padded to whole vectors.
constexpr int64_t padded_halves(int64_t dim) {
  return (dim + kPairHalves - 1) / kPairHalves * kPairHalves;
}

template <class V>
QKV_INLINE V broadcast(const Pair* p) {
  uint32_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return bits - V{};
}

QKV_INLINE Vec<float> add_product(Vec<Pair> a, Vec<Pair> b, Vec<float> sum, Pair) {
  return native_dot_pairs(sum, a, b);
}

// The pairs (a[i], b[i]) for the first or the second half of all i.
template <bool second_half>
QKV_INLINE Vec<Pair> zip(PairHalves a, PairHalves b) {
  return (Vec<Pair>)shuffle(a, b, [](int i) {
    return (i & 1 ? kPairHalves : 0) + i / 2 + (second_half ? kPairHalves / 2 : 0);
  });
}

QKV_INLINE PairHalves load_halves(const BFloat16* p) {
  PairHalves x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

QKV_INLINE Vec<Pair> pair_up(Vec<float> first, Vec<float> second) {
  const PairHalves halves = (PairHalves)native_narrow(first, second);
  return (Vec<Pair>)shuffle(halves, halves,
                            [](int i) { return (i & 1 ? kLanes<float> : 0) + i / 2; });
}

// out [pairs_in(rows) x lanes] = pairs of two consecutive rows of `in` [rows x lanes], rounded to
// bf16. The last of an odd number of rows is paired with 0. `lanes` is a multiple of kLanes<float>.
inline void pair_rows(const float* in, int64_t in_row, int64_t rows, int64_t lanes, Pair* out) {
  for (int64_t r = 0; r < rows; r += 2, in += 2 * in_row, out += lanes)
    for (int64_t l = 0; l < lanes; l += kLanes<float>)
      store(out + l, pair_up(load(in + l), r + 1 < rows ? load(in + in_row + l) : Vec<float>{}));
}

// Rounds `columns` elements of each row from f32 to bf16. Up to kPairHalves - 1 more are written,
// which mean nothing; but the one that the last of an odd number of columns is paired with is 0.
inline void narrow_rows(const float* in, int64_t in_row, int64_t rows, int64_t columns,
                        BFloat16* out, int64_t out_row) {
  for (int64_t r = 0; r < rows; ++r, in += in_row, out += out_row) {
    for (int64_t c = 0; c < columns; c += kPairHalves) {
      const auto halves = native_narrow(load(in + c), load(in + c + kLanes<float>));
      std::memcpy(out + c, &halves, sizeof halves);
    }
    if (columns % 2) out[columns] = {};
  }
}

// What rounding took off x: x - rounded; 0 where x is infinite or NaN.
QKV_INLINE Vec<float> rest_of(Vec<float> x, Vec<float> rounded) {
  const Vec<float> rest = x - rounded;
  return rest == rest ? rest : Vec<float>{};
}

// pairs, what pair_rows made of `in`, become the pairs of what rounding took off `in`.
inline void pair_rest(const float* in, int64_t in_row, int64_t rows, int64_t lanes, Pair* pairs) {
  for (int64_t r = 0; r < rows; r += 2, in += 2 * in_row, pairs += lanes)
    for (int64_t l = 0; l < lanes; l += kLanes<float>) {
      const Vec<Pair> rounded = load(pairs + l);
      const Vec<float> second = r + 1 < rows ? load(in + in_row + l) : Vec<float>{};
      store(pairs + l, pair_up(rest_of(load(in + l), (Vec<float>)(rounded << 16)),
                               rest_of(second, (Vec<float>)(rounded & 0xffff0000))));
    }
}

// `narrow`, what narrow_rows made of `in`, becomes what rounding took off `in`.
inline void narrow_rest(const float* in, int64_t in_row, int64_t rows, int64_t columns,
                        BFloat16* narrow, int64_t narrow_row) {
  for (int64_t r = 0; r < rows; ++r, in += in_row, narrow += narrow_row) {
    for (int64_t c = 0; c < columns; c += kLanes<float>)
      store_narrow(narrow + c, rest_of(load(in + c), load_wide(narrow + c)));
    if (columns % 2) narrow[columns] = {};
  }
}

// to[0 .. padded_halves(dim)) = the `dim` elements of one row, `col` apart, and zeros.
QKV_INLINE void copy_row(const BFloat16* from, int64_t col, int64_t dim, BFloat16* to) {
  int64_t d = 0;
  if (col == 1)
    for (; d + kPairHalves <= dim; d += kPairHalves) {
      const PairHalves whole = load_halves(from + d);
      std::memcpy(to + d, &whole, sizeof whole);
    }
  for (; d < dim; ++d) to[d] = from[d * col];
  std::fill(to + dim, to + padded_halves(dim), BFloat16{});
}

// The pairs of kPairHalves elements of two rows, in their order. `second` may be null: zeros.
QKV_INLINE void zip_vectors(const BFloat16* first, const BFloat16* second, Vec<Pair>& low,
                            Vec<Pair>& high) {
  const PairHalves a = load_halves(first), b = second ? load_halves(second) : PairHalves{};
  low = zip<false>(a, b), high = zip<true>(a, b);
}

// to[0 .. padded_halves(dim)) = pairs of the elements of two rows, and zeros beyond dim. `second`
// may be null, and then counts as a row of zeros.
QKV_INLINE void zip_rows(const BFloat16* first, const BFloat16* second, int64_t col, int64_t dim,
                         Pair* to) {
  int64_t d = 0;
  if (col == 1)
    for (; d + kPairHalves <= dim; d += kPairHalves) {
      Vec<Pair> low, high;
      zip_vectors(first + d, second ? second + d : nullptr, low, high);
      store(to + d, low), store(to + d + kLanes<Pair>, high);
    }
  for (; d < dim; ++d) to[d] = {first[d * col], second ? second[d * col] : BFloat16{}};
  std::fill(to + d, to + padded_halves(dim), Pair{});
}

}  // namespace qkv::QKV_ISA
