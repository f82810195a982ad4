// The functions of which kernels that multiply pairs of bf16 are made (kernels/gemm/pairs.h),
// against plain loops.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cases.h"
#include "dispatch/dispatch.h"
#include "dispatch/kernel_table.h"
#include "parts/kernel_parts.h"
#include "random.h"

namespace qkv::test {
namespace {

// The tested instruction sets that multiply pairs.
std::vector<const char*> pair_isas() {
  std::vector<const char*> isas;
  for (const char* isa : tested_isas())
    if (multiplies_pairs(isa)) isas.push_back(isa);
  return isas;
}

// An array behind whose end nothing may be touched: one element too many crashes.
template <class T>
class Array {
 public:
  explicit Array(int64_t count, bool at_front = false)
      : count_(count), memory_(size_t(count) * sizeof(T), at_front) {}
  T* data() const { return static_cast<T*>(memory_.data()); }
  T& operator[](int64_t i) const { return data()[i]; }
  int64_t size() const { return count_; }

 private:
  int64_t count_;
  GuardedMemory memory_;
};

class PairsTest : public IsaTest {
 protected:
  void fill(const Array<float>& x) {
    for (int64_t i = 0; i < x.size(); ++i) x[i] = float(draw_normal(random));
  }
  void fill(const Array<Pair>& x) {
    for (int64_t i = 0; i < x.size(); ++i)
      x[i] = {narrow<BFloat16>(float(draw_normal(random))),
              narrow<BFloat16>(float(draw_normal(random)))};
  }

  void check_gemm(int64_t rows, int64_t cols, int64_t depth, bool row_major, int beta,
                  float alpha) {
    SCOPED_TRACE(::testing::Message()
                 << rows << " x " << cols << ", depth " << depth << ", beta " << beta << ", alpha "
                 << alpha << (row_major ? ", row-major" : ", column-major"));
    const int64_t gap = draw(random, 0, 1) * 3;
    const int64_t a_row = row_major ? depth + gap : 1, a_col = row_major ? 1 : rows + gap;
    const int64_t b_row = cols + gap, c_row = cols + draw(random, 0, 1) * 5;
    const auto extent = [](int64_t n, int64_t row, int64_t m, int64_t col) {
      return n && m ? (n - 1) * row + (m - 1) * col + 1 : 0;
    };
    const Array<Pair> a(extent(rows, a_row, depth, a_col)), b(extent(depth, b_row, cols, 1));
    const Array<float> c(extent(rows, c_row, cols, 1)), factors(cols);
    fill(a), fill(b), fill(factors);
    if (beta)
      fill(c);
    else
      std::fill_n(c.data(), c.size(), std::numeric_limits<float>::quiet_NaN());  // must not be read
    const std::vector<float> before(c.data(), c.data() + c.size());
    active_parts(DType::bf16)
        .pairs.gemm(rows, cols, depth, a.data(), a_row, a_col, b.data(), b_row, c.data(), c_row,
                    beta, factors.data(), alpha);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t n = 0; n < cols; ++n) {
        double sum = 0, size = 0;
        for (int64_t k = 0; k < depth; ++k) {
          const Pair x = a[i * a_row + k * a_col], y = b[k * b_row + n];
          for (double product :
               {double(widen(x.first)) * widen(y.first), double(widen(x.second)) * widen(y.second)})
            sum += product, size += std::abs(product);
        }
        const float old = before[i * c_row + n];
        const double rest = beta == 0 ? 0 : beta == 1 ? old : double(factors[n]) * old;
        const double bound =
            (2 * double(depth) + 4) * 0x1p-24 * (std::abs(alpha) * size + std::abs(rest));
        ASSERT_LE(std::abs(c[i * c_row + n] - (alpha * sum + rest)), bound) << i << ", " << n;
      }
    for (int64_t i = 0; i + 1 < rows; ++i)
      for (int64_t n = cols; n < c_row; ++n)
        ASSERT_TRUE(c[i * c_row + n] == before[i * c_row + n] || beta == 0) << "written beside C";
  }

  Random random{1};
};

// A CPU may have no such instructions, and a tree no twins of them.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(PairsTest);
INSTANTIATE_TEST_SUITE_P(Isa, PairsTest, ::testing::ValuesIn(pair_isas()),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(PairsTest, AreThere) {
  ASSERT_TRUE(active_implementation().kernels(DType::bf16).multiplies_pairs);
}

TEST_P(PairsTest, Gemm) {
  const Kernels& kernels = active_implementation().kernels(DType::bf16);
  for (int64_t rows = 1; rows <= 50; rows += kQuick ? 5 : 1)
    for (int64_t vectors : {1, 2, 3})
      for (int64_t depth : {0, 1, 2, 15, 16, 17, 32, 40})
        for (bool row_major : {true, false}) {
          if (!row_major && active_parts(DType::bf16).pairs.tiles) continue;
          const int beta = int(draw(random, 0, 2));
          check_gemm(rows, vectors * kernels.lanes, depth, row_major, beta,
                     draw_from<float>(random, {1, 0.3f}));
          if (HasFailure()) return;
        }
  for (int beta : {0, 1, 2})
    for (float alpha : {1.f, -2.5f})
      for (int64_t rows : {16, 33}) check_gemm(rows, 2 * kernels.lanes, 500, true, beta, alpha);
}

// x, or a zero of its sign in place of a subnormal number.
float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.f, x) : x; }

// Numbers with any bits: subnormal, infinite, NaN, and near the smallest and largest ones.
template <class T>
void fill_with_bits(const Array<T>& x, Random& random) {
  for (int64_t i = 0; i < x.size(); ++i) {
    auto bits = uint32_t(random());
    // Most products of random bits overflow or vanish, so half of the pairs get middling exponents.
    if (random() % 2) bits = (bits & 0xc0ffc0ff) | 0x1f001f00;
    if (random() % 4 == 0) bits &= 0x80ff80ff;
    std::memcpy(&x[i], &bits, sizeof bits);
  }
}

// One multiply-add of either instruction. It is rounded once; subnormal factors, terms and results
// are taken for 0.
float add_flushed(float a, float b, float sum) {
  return flushed(std::fma(flushed(a), flushed(b), flushed(sum)));
}

// The sum that the instructions make of `depth` pairs, at most 16, from zero.
float sum_of_pairs(const Pair* a, const Pair* b, int64_t b_step, int64_t depth, bool tiles) {
  float firsts = 0, seconds = 0;
  for (int64_t k = 0; k < depth; ++k) {
    const Pair x = a[k], y = b[k * b_step];
    // vdpbf16ps has one sum; AMX has two, which it adds up.
    float& second = tiles ? seconds : firsts;
    second = add_flushed(widen(x.second), widen(y.second), second);
    firsts = add_flushed(widen(x.first), widen(y.first), firsts);
  }
  // AMX adds the two to what was in the tile, which is 0.
  return tiles ? flushed(0.f + flushed(firsts + seconds)) : firsts;
}

bool same_bits(float x, float y) {
  return bits_of(x) == bits_of(y) || (std::isnan(x) && std::isnan(y));
}

TEST_P(PairsTest, EveryBitIsThatOfTheManual) {
  const Kernels& kernels = active_implementation().kernels(DType::bf16);
  const int64_t rows = 7, cols = 2 * kernels.lanes;
  for (int trial = 0; trial < (kQuick ? 20 : 200); ++trial)
    for (int64_t depth : {1, 3, 16}) {
      const Array<Pair> a(rows * depth), b(depth * cols);
      const Array<float> c(rows * cols);
      fill_with_bits(a, random), fill_with_bits(b, random);
      active_parts(DType::bf16)
          .pairs.gemm(rows, cols, depth, a.data(), depth, 1, b.data(), cols, c.data(), cols, 0,
                      nullptr, 1);
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t n = 0; n < cols; ++n) {
          const float expected = sum_of_pairs(a.data() + i * depth, b.data() + n, cols, depth,
                                              active_parts(DType::bf16).pairs.tiles);
          ASSERT_TRUE(same_bits(c[i * cols + n], expected))
              << c[i * cols + n] << " instead of " << expected << ", depth " << depth;
        }
    }
}

// Where the CPU has the instructions, they and their twin make the same bits of the same call.
// (Only with factors of bf16: of other types, products are made by FMA on one side and without on
// the other.)
TEST_P(PairsTest, TwinAndHardwareAgree) {
  const std::string twin = std::string("emulated_") + GetParam();
  if (std::string(GetParam()).find("emulated_") == 0) GTEST_SKIP() << "the twin itself";
  const std::vector<const char*> isas = tested_isas();
  if (std::find(isas.begin(), isas.end(), twin) == isas.end())
    GTEST_SKIP() << "no twin was compiled of an instruction set that the CPU has";
  const int64_t cols = 3 * active_implementation().kernels(DType::bf16).lanes;
  const KernelParts& own = active_parts(DType::bf16);
  set_isa(twin.c_str());
  const KernelParts& twins = active_parts(DType::bf16);
  for (int beta : {0, 1})
    for (int64_t rows : {1, 16, 33})
      for (int64_t depth : {1, 16, 45, 300}) {
        const Array<Pair> a(rows * depth), b(depth * cols);
        const Array<float> c(rows * cols), other(rows * cols);
        fill_with_bits(a, random), fill_with_bits(b, random), fill_with_bits(c, random);
        std::copy_n(c.data(), c.size(), other.data());
        const auto call = [&](const KernelParts& parts, const Array<float>& to) {
          parts.pairs.gemm(rows, cols, depth, a.data(), depth, 1, b.data(), cols, to.data(), cols,
                           beta, nullptr, 1);
        };
        call(own, c), call(twins, other);
        for (int64_t i = 0; i < c.size(); ++i)
          ASSERT_TRUE(same_bits(c[i], other[i])) << c[i] << " and, by the twin, " << other[i];
      }
}

// The memory beside both factors holds NaN, and none gets into the product.
TEST_P(PairsTest, GemmDoesNotUseItsSurroundings) {
  const Kernels& kernels = active_implementation().kernels(DType::bf16);
  const int64_t rows = 5, cols = kernels.lanes, depth = 3;
  const Array<Pair> a(16 * 16), b(16 * cols);
  const Array<float> c(16 * cols);
  const Pair nan = {{0x7FC0}, {0x7FC0}}, one = {{0x3F80}, {0x3F80}};
  std::fill_n(a.data(), a.size(), nan), std::fill_n(b.data(), b.size(), nan);
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t i = 0; i < rows; ++i) a[i * 16 + k] = one;
    std::fill_n(b.data() + k * cols, cols, one);
  }
  active_parts(DType::bf16)
      .pairs.gemm(rows, cols, depth, a.data(), 16, 1, b.data(), cols, c.data(), cols, 0, nullptr,
                  1);
  for (int64_t i = 0; i < rows * cols; ++i) ASSERT_EQ(c[i], float(2 * depth)) << i;
}

// Rounding of ties, the largest number, infinity, zeros, and numbers of any size. Subnormal ones
// become zeros.
TEST_P(PairsTest, Rounding) {
  const Kernels& kernels = active_implementation().kernels(DType::bf16);
  const int64_t lanes = 2 * kernels.lanes;
  std::vector<float> numbers = {0.f,         -0.f,        INFINITY, -INFINITY, 3.4e38f, -3.4e38f,
                                1.00390625f, 1.01171875f, 1e-37f,   1e-39f,    -1e-40f, 0x1p-126f};
  while (int64_t(numbers.size()) < 40 * lanes) {
    const float x = float_of_bits(uint32_t(random()));
    if (std::isfinite(x)) numbers.push_back(x);
  }
  for (int64_t rows : {1, 2, 39, 40}) {
    const Array<float> in(rows * lanes);
    std::copy_n(numbers.begin(), in.size(), in.data());
    const Array<Pair> pairs((rows + 1) / 2 * lanes);
    const Array<BFloat16> narrow_rows(rows * lanes);
    active_parts(DType::bf16).pairs.pair_rows(in.data(), lanes, rows, lanes, pairs.data());
    active_parts(DType::bf16)
        .pairs.narrow_rows(in.data(), lanes, rows, lanes, narrow_rows.data(), lanes);
    for (int64_t r = 0; r < rows + rows % 2; ++r)
      for (int64_t l = 0; l < lanes; ++l) {
        const Pair pair = pairs[r / 2 * lanes + l];
        const uint16_t actual = (r % 2 ? pair.second : pair.first).bits;
        if (r == rows) {
          ASSERT_EQ(actual, 0) << "beside an odd row";
          continue;
        }
        const float x = in[r * lanes + l];
        ASSERT_EQ(actual, narrow<BFloat16>(flushed(x)).bits) << x;
        ASSERT_EQ(narrow_rows[r * lanes + l].bits, actual) << x;
      }
  }
}

// Two blocks of keys, one after the other, against exponentials in double. Lane 0 sees no key, and
// in lane 1 the second block has by far the largest score.
TEST_P(PairsTest, SoftmaxRoundsAndPairsWeightsAndAddsUpBoth) {
  const Kernels& kernels = active_implementation().kernels(DType::bf16);
  for (int64_t lanes : {kernels.lanes, 2 * kernels.lanes})
    for (int64_t keys : {1, 2, 7, 32, 41}) {
      const Array<float> scores(2 * keys * lanes), weights(2 * keys * lanes);
      fill(scores);
      for (int64_t j = 0; j < 2 * keys; ++j)
        for (int64_t l = 0; l < lanes; ++l) scores[j * lanes + l] *= 8;
      for (int64_t j = 0; j < 2 * keys; ++j) scores[j * lanes] = -INFINITY;
      scores[(2 * keys - 1) * lanes + 1] = 700;
      const Array<float> top(lanes), sum(lanes), rounded_sum(lanes), rescale(lanes);
      std::fill_n(top.data(), lanes, -INFINITY);
      std::copy_n(scores.data(), scores.size(), weights.data());
      std::vector<double> sums(lanes), rounded_sums(lanes);
      for (int64_t block : {0, 1}) {
        const int64_t begin = block * keys * lanes;
        const Array<Pair> pairs((keys + 1) / 2 * lanes);
        active_parts(DType::bf16)
            .pairs.softmax(lanes, keys, weights.data() + begin, top.data(), sum.data(),
                           rounded_sum.data(), rescale.data(), pairs.data());
        for (int64_t l = 0; l < lanes; ++l) {
          float largest = -INFINITY;
          for (int64_t j = 0; j < (block + 1) * keys; ++j)
            largest = std::max(largest, scores[j * lanes + l]);
          ASSERT_EQ(top[l], largest);
          sums[l] *= rescale[l], rounded_sums[l] *= rescale[l];
          for (int64_t j = 0; j < keys; ++j) {
            const float weight = weights[begin + j * lanes + l];
            const double below = double(scores[begin + j * lanes + l]) - double(largest);
            const double exact = l == 0 ? 0 : std::exp(below);
            // A difference of scores is rounded, so errors are relative to it.
            ASSERT_NEAR(weight, exact, (2e-7 - 8e-8 * std::max(-87., below)) * exact + 1e-37)
                << j << ", " << l;
            const Pair pair = pairs[j / 2 * lanes + l];
            const BFloat16 rounded = j % 2 ? pair.second : pair.first;
            ASSERT_EQ(rounded.bits, narrow<BFloat16>(flushed(weight)).bits) << j << ", " << l;
            sums[l] += weight, rounded_sums[l] += widen(rounded);
          }
          if (keys % 2) {
            ASSERT_EQ(pairs[keys / 2 * lanes + l].second.bits, 0);
          }
          ASSERT_NEAR(sum[l], sums[l], 5e-7 * sums[l]) << keys << ", " << l;
          ASSERT_NEAR(rounded_sum[l], rounded_sums[l], 5e-7 * rounded_sums[l]) << keys << ", " << l;
        }
      }
    }
}

// Behind the last column, memory may hold anything, and the last column's pair must not have it.
TEST_P(PairsTest, AnOddColumnIsPairedWithZero) {
  const Kernels& kernels = active_implementation().kernels(DType::bf16);
  const int64_t lanes = 2 * kernels.lanes;
  const Array<float> in(2 * lanes);
  std::fill_n(in.data(), in.size(), std::numeric_limits<float>::quiet_NaN());
  const Array<BFloat16> out(2 * lanes);
  for (int64_t columns = 1; columns < lanes; columns += 2) {
    active_parts(DType::bf16).pairs.narrow_rows(in.data(), lanes, 2, columns, out.data(), lanes);
    for (int64_t r : {0, 1}) ASSERT_EQ(out[r * lanes + columns].bits, 0) << columns;
  }
}

TEST_P(PairsTest, NanStaysNan) {
  const Kernels& kernels = active_implementation().kernels(DType::bf16);
  const int64_t lanes = 2 * kernels.lanes;
  const Array<float> in(lanes);
  std::fill_n(in.data(), lanes, float_of_bits(0x7F800001));
  const Array<Pair> pairs(lanes);
  active_parts(DType::bf16).pairs.pair_rows(in.data(), lanes, 1, lanes, pairs.data());
  for (int64_t l = 0; l < lanes; ++l) ASSERT_TRUE(std::isnan(widen(pairs[l].first)));
}

}  // namespace
}  // namespace qkv::test
