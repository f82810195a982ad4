// How planes of few rows (few_rows.h) become words, numbers of 16 bits of which an instruction
// multiplies pairs and adds both products to a sum of 32 bits (few_pairs.h, few_pair_values.h):
// bf16 as it lies in memory, and where keys are int8, whole numbers, whose sums are exact.
//
// Beside keys of int8, queries and weights become words by a factor of each row: queries by a power
// of two, which puts their largest number at 2^14 or above, and the weights of a block by what
// makes their largest one 2^15 - 1. So a number is off by up to 2^-15 of the largest one of its
// row: only where queries and the output are rounded to 8 or 11 bits, in half precision, is that
// little enough.
#pragma once

#include "kernels/operands/rows.h"
#include "kernels/products/few_rows.h"

namespace qkv::QKV_ISA {

// Whether this CPU has the instructions that vec.h multiplies words by; true unless that says
// other.
#ifndef QKV_HAS_WORDS
#define QKV_HAS_WORDS true
#endif
constexpr int kWords = kVectorBytes / sizeof(int16_t);  // of a vector, which has W pairs of them
typedef int16_t HalfWords __attribute__((vector_size(kVectorBytes / 2)));

// What numbers are multiplied by is no larger, so that neither it nor its inverse is infinite or
// subnormal.
constexpr float kLargestFactor = 0x1p126f;

// A sum of so many products of a word and an int8 number cannot overflow; where there are more,
// words are half as large.
constexpr int64_t kSafeWords = (int64_t(1) << 31) / (32768 * 128) - 1;

// Whether rows of K, keys or values of `dim` numbers, are multiplied in this way beside queries of
// E. Where there are tiles of bf16 it is an Intel's, whose vectors multiply pairs at half the speed
// of multiply-adds.
template <class E, class K>
constexpr bool kMayMultiplyPairs =
    !kFixedBits && (std::is_same_v<K, int8_t> ? kIsHalf<E> : kInPairs<K> && !kTiles);
template <class E, class K>
bool multiplies_pairs(int64_t dim) {
  if (!kMayMultiplyPairs<E, K> || dim % kWords != 0) return false;
  return !std::is_same_v<K, int8_t> || (QKV_HAS_WORDS && dim <= 2 * kSafeWords);
}

// What queries and weights are, of which two make a pair, and a vector of sums.
template <class K>
using Word = std::conditional_t<std::is_same_v<K, int8_t>, int16_t, K>;
template <class K>
using PairSum = std::conditional_t<std::is_same_v<K, int8_t>, int32_t, float>;

QKV_INLINE Words words_at(const int8_t* from) { return native_widen(from, Words{}); }
template <class W>
QKV_INLINE Words words_at(const W* from) {
  Words words;
  std::memcpy(&words, from, sizeof words);
  return words;
}

// sum + the products of the pairs of a with those of b.
template <class K>
QKV_INLINE Vec<PairSum<K>> add_pairs(Vec<PairSum<K>> sum, Words a, Words b) {
  if constexpr (std::is_same_v<K, int8_t>)
    return native_dot_words(sum, (Int32)a, (Int32)b);
  else
    return add_product((Vec<Factor<K>>)a, (Vec<Factor<K>>)b, sum, Factor<K>{});
}

// x, rounded to whole numbers of up to 16 bits, as W words at `to`: beside 1.5 * 2^23 a float has
// no fraction, and its low bits are those of the sum as an integer.
QKV_INLINE void store_words(Vec<float> x, int16_t* to) {
  const auto words = __builtin_convertvector((IntVec<float>)(x + 0x1.8p23f), HalfWords);
  std::memcpy(to, &words, sizeof words);
}

// The largest magnitude of x [count]; NaN if one of them is NaN or infinite.
inline float largest_of(const float* x, int64_t count) {
  IntVec<float> top{};
  for (int64_t i = 0; i < count; i += kLanes<float>) {
    const IntVec<float> bits = (IntVec<float>)load(x + i) & 0x7fffffff;
    top = bits > top ? bits : top;
  }
  int32_t most = 0;
  for (int i = 0; i < kLanes<float>; ++i) most = std::max(most, int32_t(top[i]));
  float largest;
  std::memcpy(&largest, &most, sizeof largest);
  return largest - largest == 0 ? largest : std::numeric_limits<float>::quiet_NaN();
}

// to [dim] = the numbers of a row, `col` apart, as words; returns what one of them counts. wide
// [dim] is scratch memory.
template <class E>
float row_to_words(const E* from, int64_t col, int64_t dim, float* wide, int16_t* to) {
  gather_row(from, col, dim, wide);
  const int bits = dim <= kSafeWords ? 14 : 13;
  const float largest = largest_of(wide, dim);
  const float factor =
      largest > 0 ? std::min(kLargestFactor, std::ldexp(1.f, bits - std::ilogb(largest))) : 1;
  for (int64_t d = 0; d < dim; d += kLanes<float>) store_words(load(wide + d) * factor, to + d);
  return (largest == largest ? 1 : largest) / factor;
}
template <class H>
float row_to_words(const H* from, int64_t col, int64_t dim, float*, H* to) {
  copy_row(from, col, dim, to);
  return 1;
}

// words [rows, kFewStep] = weights [rows x keys], with a weight of 0 behind an odd number of keys;
// units [rows]: what one of them counts.
inline void weights_to_words(int64_t rows, int64_t keys, const float* weights, int16_t* words,
                             float* units) {
  for (int64_t r = 0; r < rows; ++r, weights += kFewStep, words += kFewStep) {
    const float largest = largest_of(weights, padded<float>(keys));
    const float factor = largest == largest ? std::min(32767 / largest, kLargestFactor) : 0;
    units[r] = largest == largest ? 1 / factor : largest;
    for (int64_t j = 0; j < keys; j += kLanes<float>)
      store_words(load(weights + j) * factor, words + j);
  }
}
template <class H>
void weights_to_words(int64_t rows, int64_t keys, const float* weights, H* words, float* units) {
  narrow_rows(weights, kFewStep, rows, keys, words, kFewStep);
  std::fill_n(units, rows, 1.f);
}

}  // namespace qkv::QKV_ISA
