// The kernels' own conversions of half precision, for every number of bf16 and f16: the average of
// a few values, which the kernels widen, add up and round again, is known to the bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "cases.h"

namespace qkv::test {
namespace {

class ConversionsTest : public IsaTest {};

QKV_FOR_EACH_ISA(ConversionsTest);

// A number of any type: the compiler does not see which one it is.
struct alignas(8) Any {
  unsigned char bytes[8] = {};
};

// Every finite number from the lowest to the largest, -0 left out.
std::vector<double> all_numbers(DType half) {
  std::vector<double> all;
  for (int n = 0; n < 0x10000; ++n) {
    const auto bits = uint16_t(n);
    Any memory;
    std::memcpy(memory.bytes, &bits, sizeof bits);
    const double x = reference::read(type_of(half), memory.bytes, 0);
    if (std::isfinite(x) && n != 0x8000) all.push_back(x);
  }
  std::sort(all.begin(), all.end());
  return all;
}

double rounded(DType half, double x) {
  Any memory;
  reference::write(type_of(half), memory.bytes, 0, x);
  return reference::read(type_of(half), memory.bytes, 0);
}

// Attention whose queries are 0, so that each key has weight 1 / keys. Element n of the value of
// key j is value(n, j).
template <class Value>
std::vector<double> means(DType half, int64_t n, int64_t keys, int64_t dim, const Value& value) {
  Case c;
  c.dtype = half, c.batch = {(n + dim - 1) / dim}, c.S = keys, c.L = 1, c.D = 8, c.Dv = dim;
  Workload w(c);
  w.query.fill([] { return 0; });
  for (int64_t j = 0; j < keys; ++j)
    for (int64_t i = 0; i < c.batch[0] * dim; ++i)
      w.value.set({i / dim, 0, j, i % dim}, value(std::min(i, n - 1), j));
  std::vector<double> output = run_forward(w).output;
  output.resize(size_t(n));
  return output;
}

// A whole number of vectors, and a number of elements with a remainder.
const Sizes kDims = {64, 61};

TEST_P(ConversionsTest, EveryNumberComesBack) {
  for (DType half : {DType::bf16, DType::f16}) {
    const std::vector<double> all = all_numbers(half);
    for (int64_t dim : kDims) {
      const auto value = [&](int64_t n, int64_t) { return all[size_t(n)]; };
      const std::vector<double> r = means(half, int64_t(all.size()), 1, dim, value);
      // A value is multiplied by its weight: instructions that multiply bf16 take the subnormal
      // ones, those below 2^-126, for 0.
      const double smallest = half == DType::bf16 && multiplies_pairs(GetParam()) ? 0x1p-126 : 0;
      for (size_t n = 0; n < all.size(); ++n)
        ASSERT_EQ(r[n], std::abs(all[n]) < smallest ? 0 : all[n]) << half << " " << all[n];
    }
  }
}

// The middle and the quarters between each number and the next are rounded to the nearest, and if
// two are as near, to the even one. bf16's largest numbers are left out, since the sum of four is
// infinite, and its smallest, which are so small that f32 has no more digits.
TEST_P(ConversionsTest, WhatLiesBetweenIsRoundedToTheNearest) {
  for (DType half : {DType::bf16, DType::f16}) {
    std::vector<double> all = all_numbers(half);
    const auto far = [&](double x) {
      return half == DType::bf16 && (std::abs(x) > 0x1p125 || std::abs(x) < 0x1p-110);
    };
    all.erase(std::remove_if(all.begin(), all.end(), far), all.end());
    for (int64_t dim : kDims) {
      for (int64_t above = 1; above < 4; ++above) {  // of four keys
        const auto value = [&](int64_t n, int64_t j) { return all[size_t(n + (j < above))]; };
        const std::vector<double> r = means(half, int64_t(all.size()) - 1, 4, dim, value);
        for (size_t n = 0; n + 1 < all.size(); ++n) {
          const double mean = (double(4 - above) * all[n] + double(above) * all[n + 1]) / 4;
          ASSERT_EQ(r[n], rounded(half, mean))
              << half << " between " << all[n] << " and " << all[n + 1];
        }
      }
    }
  }
}

}  // namespace
}  // namespace qkv::test
