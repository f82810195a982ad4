// The kernels' exp, exp2, tanh, sin and cos. Where the result is a normal number they are at most a
// few units in the last place off, where it is subnormal they are right or 0, and NaN gives NaN.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "cases.h"
#include "dispatch/dispatch.h"
#include "parts/kernel_parts.h"

namespace qkv::test {
namespace {

constexpr int64_t kBlock = 1024;  // numbers of one call: a multiple of the lanes of every vector

using Hook = void (*KernelParts::*)(const void* in, void* out, int64_t count);

struct Function {
  const char* name;
  Hook hook;
  double (*exact)(double);
  long double (*exact_f64)(long double);
  float range;       // the largest |x| that is tried in f32, at most 2^127
  double range_f64;  // the largest |x| that is tried in f64, at most 2^1022
  int stride;        // one float of so many is tried
  double most_ulp;   // the largest error, in units in the last place
  double most_ulp_f64;
};

// Every float is tried in exp, since every score goes through it.
const Function kExp = {"exp", &KernelParts::exp, std::exp, std::exp, 88, 708, 1, 2, 2};
const Function kExp2 = {"exp2", &KernelParts::exp2, std::exp2, std::exp2, 127, 1022, 31, 2, 2};
const Function kTanh = {"tanh", &KernelParts::tanh, std::tanh, std::tanh, 1e6, 25, 31, 4, 4};
// Sines of floats are computed in double. Without FMA those of doubles are less exact.
const Function kSin = {"sin", &KernelParts::sin, std::sin, std::sin, 0x1p127f, 0x1p1022, 31, .501,
                       .8};
const Function kCos = {"cos", &KernelParts::cos, std::cos, std::cos, 0x1p127f, 0x1p1022, 31, .501,
                       .8};

const KernelParts& parts(const char* isa, DType dtype) {
  set_isa(isa);
  return active_parts(dtype);
}

// The largest power of two not above |y|, a normal number.
double floor_power(double y) {
  uint64_t bits;
  std::memcpy(&bits, &y, 8);
  bits &= uint64_t{0x7FF} << 52;
  std::memcpy(&y, &bits, 8);
  return y;
}

// The largest error over kBlock numbers, in units in the last place; infinite if a result below the
// normal range is neither 0 nor right.
double worst_ulp(const KernelParts& parts, Hook hook, const float* in, const double* exact) {
  float out[kBlock];
  (parts.*hook)(in, out, kBlock);
  double worst = 0;
  for (int64_t i = 0; i < kBlock; ++i) {
    const bool flushed = std::abs(exact[i]) < 0x1p-126 && out[i] == 0;
    const double ulp = std::max(floor_power(exact[i]), 0x1p-126) * 0x1p-23;
    const double error = flushed ? 0 : std::abs(out[i] - exact[i]) / ulp;
    if (!(error <= worst)) worst = error;
  }
  return worst;
}

// One float in `step` of those with bits [begin, end], for all implementations.
void try_floats(const Function& f, uint32_t begin, uint32_t end, uint32_t step,
                const std::vector<KernelParts>& all, std::vector<double>& worst) {
  const int64_t blocks = int64_t(end - begin) / (kBlock * step);
#pragma omp parallel for schedule(dynamic, 64)
  for (int64_t block = 0; block <= blocks; ++block) {
    // The last block ends at `end` and overlaps the one before.
    const uint32_t first = block < blocks ? begin + uint32_t(block * kBlock) * step
                                          : end - uint32_t(kBlock - 1) * step;
    float in[kBlock];
    double exact[kBlock];
    for (int64_t i = 0; i < kBlock; ++i) {
      const uint32_t bits = first + uint32_t(i) * step;
      std::memcpy(&in[i], &bits, 4);
      exact[i] = f.exact(double(in[i]));
    }
    for (size_t k = 0; k < all.size(); ++k) {
      const double ulp = worst_ulp(all[k], f.hook, in, exact);
#pragma omp critical
      if (!(ulp <= worst[k])) worst[k] = ulp;
    }
  }
}

class FunctionTest : public ::testing::TestWithParam<Function> {
 protected:
  void TearDown() override { set_isa(supported_isas().front()); }
};

INSTANTIATE_TEST_SUITE_P(All, FunctionTest, ::testing::Values(kExp, kExp2, kTanh, kSin, kCos),
                         [](const auto& info) { return std::string(info.param.name); });

// Floats of both signs from 2^-26 up; below that the result is 1, or x itself, and one float of
// 1009 is tried.
TEST_P(FunctionTest, EveryFloat) {
  const Function& f = GetParam();
  std::vector<KernelParts> all;
  for (const char* isa : supported_isas()) all.push_back(parts(isa, DType::f32));
  std::vector<double> worst(all.size());
  const uint32_t step = f.stride * (kQuick ? 101 : 1), small = (127 - 26) << 23;
  uint32_t range;
  std::memcpy(&range, &f.range, 4);
  for (uint32_t sign : {0u, 0x80000000u}) {
    try_floats(f, sign, sign + small, 1009 * step, all, worst);
    try_floats(f, sign + small, sign + range, step, all, worst);
  }
  for (size_t k = 0; k < all.size(); ++k) {
    EXPECT_LE(worst[k], f.most_ulp) << supported_isas()[k];
    RecordProperty(std::string("worst_ulp_") + supported_isas()[k], std::to_string(worst[k]));
  }
}

TEST_P(FunctionTest, SampledDoubles) {
  const Function& f = GetParam();
  for (const char* isa : supported_isas()) {
    const KernelParts& k = parts(isa, DType::f64);
    Random random(1);
    double worst = 0, in[kBlock], out[kBlock];
    for (int block = 0; block < (kQuick ? 50 : 500); ++block) {
      const double range = std::vector<double>{f.range_f64, 1, 1e-8}[block % 3];
      for (double& x : in) x = std::uniform_real_distribution<double>(-range, range)(random);
      (k.*f.hook)(in, out, kBlock);
      for (int64_t i = 0; i < kBlock; ++i) {
        const long double exact = f.exact_f64(in[i]);
        const double ulp = floor_power(double(exact)) * 0x1p-52;
        worst = std::max(worst, double(std::abs(out[i] - exact)) / ulp);
      }
    }
    EXPECT_LE(worst, f.most_ulp_f64) << isa;
    RecordProperty(std::string("worst_ulp_") + isa, std::to_string(worst));
  }
}

template <class T>
T result(const KernelParts& parts, Hook hook, T x) {
  std::vector<T> in(64, x), out(64);
  (parts.*hook)(in.data(), out.data(), 64);
  for (T y : out) EXPECT_EQ(std::memcmp(&y, &out[0], sizeof(T)), 0) << "lanes differ at " << x;
  return out[0];
}

template <class T>
void expect_exp_edges(const KernelParts& parts, const Function& f, T below_normal) {
  using Limits = std::numeric_limits<T>;
  EXPECT_EQ(result<T>(parts, f.hook, 0), 1);
  EXPECT_EQ(result<T>(parts, f.hook, -T(0)), 1);
  for (T x : {below_normal, below_normal * 2, T(-1e6), Limits::lowest(), -Limits::infinity()})
    EXPECT_EQ(result<T>(parts, f.hook, x), 0) << x;
  EXPECT_TRUE(std::isnan(result<T>(parts, f.hook, Limits::quiet_NaN())));
  EXPECT_TRUE(std::isnan(result<T>(parts, f.hook, -Limits::quiet_NaN())));
}

TEST(ExpTest, Edges) {
  for (const char* isa : supported_isas()) {
    for (const Function& f : {kExp, kExp2}) {
      SCOPED_TRACE(::testing::Message() << f.name << " " << isa);
      const double unit = f.hook == kExp2.hook ? 1 : std::log(2.0);
      expect_exp_edges<float>(parts(isa, DType::f32), f, float(-127.01 * unit));
      expect_exp_edges<double>(parts(isa, DType::f64), f, -1023.01 * unit);
    }
  }
  set_isa(supported_isas().front());
}

template <class T>
void expect_tanh_edges(const KernelParts& parts) {
  using Limits = std::numeric_limits<T>;
  for (T x : {T(0), Limits::min(), Limits::epsilon()}) {  // tanh(x) is x, and keeps the sign of 0
    EXPECT_EQ(result<T>(parts, kTanh.hook, x), x);
    EXPECT_EQ(result<T>(parts, kTanh.hook, -x), -x);
    EXPECT_TRUE(std::signbit(result<T>(parts, kTanh.hook, -x)));
  }
  for (T x : {T(30), T(1e6), Limits::max(), Limits::infinity()}) {
    EXPECT_EQ(result<T>(parts, kTanh.hook, x), 1) << x;
    EXPECT_EQ(result<T>(parts, kTanh.hook, -x), -1) << x;
  }
  EXPECT_TRUE(std::isnan(result<T>(parts, kTanh.hook, Limits::quiet_NaN())));
  EXPECT_TRUE(std::isnan(result<T>(parts, kTanh.hook, -Limits::quiet_NaN())));
}

TEST(TanhTest, Edges) {
  for (const char* isa : supported_isas()) {
    SCOPED_TRACE(isa);
    expect_tanh_edges<float>(parts(isa, DType::f32));
    expect_tanh_edges<double>(parts(isa, DType::f64));
  }
  set_isa(supported_isas().front());
}

// In every binade, and next to multiples of pi/2, as far as those of long double are near enough.
TEST(SineTest, DoublesOfAnySize) {
  for (const char* isa : supported_isas())
    for (const Function& f : {kSin, kCos}) {
      const KernelParts& k = parts(isa, DType::f64);
      Random random(7);
      double worst = 0, in[kBlock], out[kBlock];
      for (int exponent = -40; exponent < 1023; exponent += kQuick ? 7 : 1) {
        const double power = std::ldexp(1, exponent);
        for (int64_t i = 0; i < kBlock; ++i) {
          in[i] = power * std::uniform_real_distribution<double>(1, 2)(random);
          const long double turn = 1.57079632679489661923132169163975144L;
          if (i % 2 && exponent >= 0 && exponent < 50) in[i] = double(roundl(in[i] / turn) * turn);
          if (i % 3 == 0) in[i] = -in[i];
        }
        (k.*f.hook)(in, out, kBlock);
        for (int64_t i = 0; i < kBlock; ++i) {
          const long double exact = f.exact_f64(in[i]);
          const double ulp = floor_power(double(exact)) * 0x1p-52;
          worst = std::max(worst, double(std::abs(out[i] - exact)) / ulp);
        }
      }
      EXPECT_LE(worst, std::string(isa) == "generic" ? .8 : .62) << isa << " " << f.name;
    }
  set_isa(supported_isas().front());
}

template <class T>
void expect_sine_edges(const KernelParts& parts) {
  using Limits = std::numeric_limits<T>;
  for (T x : {T(0), Limits::denorm_min(), Limits::min()}) {  // sin(x) is x, with its sign
    for (T y : {x, -x}) {
      const T sine = result<T>(parts, kSin.hook, y);
      EXPECT_EQ(sine, y);
      EXPECT_EQ(std::signbit(sine), std::signbit(y));
      EXPECT_EQ(result<T>(parts, kCos.hook, y), 1);
    }
  }
  for (T x : {Limits::infinity(), Limits::quiet_NaN()})
    for (Hook hook : {kSin.hook, kCos.hook}) {
      EXPECT_TRUE(std::isnan(result<T>(parts, hook, x)));
      EXPECT_TRUE(std::isnan(result<T>(parts, hook, -x)));
    }
}

TEST(SineTest, Edges) {
  for (const char* isa : supported_isas()) {
    SCOPED_TRACE(isa);
    expect_sine_edges<float>(parts(isa, DType::f32));
    expect_sine_edges<double>(parts(isa, DType::f64));
    // No double is nearer to a multiple of pi/2.
    const double nearest = std::ldexp(6381956970095103, 797);
    EXPECT_EQ(result<double>(parts(isa, DType::f64), kCos.hook, nearest), -4.68716592425462761e-19);
  }
  set_isa(supported_isas().front());
}

TEST(Exp2Test, ExactAtIntegers) {
  for (const char* isa : supported_isas()) {
    for (int n = -126; n <= 127; ++n)
      EXPECT_EQ(result<float>(parts(isa, DType::f32), kExp2.hook, float(n)), std::ldexp(1.f, n));
    for (int n = -1022; n <= 1023; ++n)
      EXPECT_EQ(result<double>(parts(isa, DType::f64), kExp2.hook, n), std::ldexp(1., n));
  }
  set_isa(supported_isas().front());
}

}  // namespace
}  // namespace qkv::test
