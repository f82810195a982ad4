// Scores of few rows (few_rows.h) with keys of int8 that are not widened to f32. They become words,
// whole numbers of 16 bits, as queries do, and an instruction adds the products of two pairs of
// words to a sum of 32 bits, exactly. Sums of values are made so, too (few_word_values.h).
//
// Queries and weights become words by a factor of each row: queries by a power of two, which puts
// their largest number at 2^14 or above, and the weights of a block by what makes their largest one
// 2^15 - 1. So a number is off by up to 2^-15 of the largest one of its row: only where queries and
// the output are rounded to 8 or 11 bits, in half precision, is that little enough.
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

// Whether rows of K are multiplied in this way by queries of E.
template <class E, class K>
constexpr bool kMayMultiplyWords = !kFixedBits && kIsHalf<E> && std::is_same_v<K, int8_t>;
template <class E, class K>
bool multiplies_words(const Problem& p) {
  return kMayMultiplyWords<E, K> && QKV_HAS_WORDS && p.head_dim % kWords == 0 &&
         p.head_dim_v % kWords == 0 && p.head_dim <= 2 * kSafeWords;
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

// Where the words of queries are in the memory of pack_few_words.
template <class Memory>
auto* query_words(Memory* memory) {
  using Word = std::conditional_t<std::is_const_v<Memory>, const int16_t, int16_t>;
  return reinterpret_cast<Word*>(memory + kTileRows<float>);
}

// Packs rows [row, row + rows) of the queries of a plane: memory [rows] = what the products of a
// row with keys are to be multiplied by, the scale among it, and query_words [rows, D] = the
// queries, portion after portion as pack_few_queries has them. memory has room for kTileRows * D.
template <class E>
void pack_few_words(const Problem& p, Plane plane, int64_t row, int64_t rows, float* memory) {
  constexpr int W = kLanes<float>;
  const Rows<const E> from = rows_of<E>(p, p.query, plane);
  int16_t* const words = query_words(memory);
  float* const wide = memory + kTileRows<float> * (1 + p.head_dim / 2);  // [D], behind the words
  const int bits = p.head_dim <= kSafeWords ? 14 : 13;
  for_each_portion<kFewPortion<float>>(rows, [&](int64_t first, auto count) {
    for (int r = 0; r < count; ++r) {
      gather_row(from[row + first + r], from.col, p.head_dim, wide);
      const float largest = largest_of(wide, p.head_dim);
      const float factor =
          largest > 0 ? std::min(kLargestFactor, std::ldexp(1.f, bits - std::ilogb(largest))) : 1;
      memory[first + r] = (largest == largest ? float(p.scale) : largest) / factor;
      int16_t* const to = words + first * p.head_dim + r * kWords;
      for (int64_t d = 0; d < p.head_dim; d += kWords)
        for (int64_t i = 0; i < kWords; i += W)
          store_words(load(wide + d + i) * factor, to + d * count + i);
    }
  });
}

// sums[r * kFewStep + j] = the dot product of the words of query r with key j, for ROWS queries.
template <int ROWS>
__attribute__((noinline)) void dot_word_rows(int64_t dim, FewPlaces<int8_t> keys,
                                             const int16_t* query, int32_t* sums,
                                             FewAhead<int8_t>& ahead) {
  constexpr int KEYS = kFewAtOnce<float, ROWS>;
  const int8_t* const* const end = keys.rows + keys.count;
  for (; keys.rows < end; keys.rows += KEYS, sums += KEYS) {
    ahead.step();
    Int32 sum[ROWS][KEYS];
    const int8_t* row[KEYS];
    QKV_UNROLL
    for (int j = 0; j < KEYS; ++j) {
      row[j] = keys.rows[j];
      QKV_UNROLL
      for (int r = 0; r < ROWS; ++r) sum[r][j] = Int32{};
    }
    for (int64_t d = 0; d < dim; d += kWords) {
      const int16_t* const q = query + d * ROWS;
      const auto key_words = [&](int j) QKV_INLINE_LAMBDA {
        return (Int32)native_widen(row[j] + d, Words{});
      };
      Int32 key[KEYS];
      QKV_UNROLL
      for (int j = 0; j < KEYS && ROWS > 1; ++j) key[j] = in_register(key_words(j));
      QKV_UNROLL
      for (int r = 0; r < ROWS; ++r) {
        Int32 x;
        std::memcpy(&x, q + r * kWords, sizeof x);
        x = in_register(x);
        QKV_UNROLL
        for (int j = 0; j < KEYS; ++j)
          sum[r][j] = native_dot_words(sum[r][j], ROWS > 1 ? key[j] : key_words(j), x);
      }
    }
    ahead.step();
    store_sums<int32_t>(sum, sums);
  }
}

// scores [rows x keys] = the scores of the queries of pack_few_words before the scales of keys.
inline void few_scores_by_words(int64_t rows, int64_t dim, FewPlaces<int8_t> keys,
                                const float* query, float* scores, FewAhead<int8_t>& ahead) {
  dot_portions<float>(rows, keys.count, ahead, [&](int64_t r, auto count) {
    int32_t* const sums = reinterpret_cast<int32_t*>(scores) + r * kFewStep;
    dot_word_rows<count>(dim, keys, query_words(query) + r * dim, sums, ahead);
  });
}

// W such sums as scores, of a query that is to be multiplied by `unit`.
QKV_INLINE Vec<float> score_of_words(const float* sums, float unit) {
  return __builtin_convertvector((Int32)load(sums), Vec<float>) * unit;
}

}  // namespace qkv::QKV_ISA
