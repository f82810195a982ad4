// The kernels' 2^t: at most 2 units in the last place off where the result is a
// normal number, exact at integers, 0 far below, NaN for NaN.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "cases.h"
#include "isa/implementation.h"

namespace qkv::test {
namespace {

constexpr int64_t kBlock = 1024;  // a multiple of every vector length

template <class T>
const Kernels& kernels(const char* isa) {
  set_isa(isa);
  return active_implementation().kernels(sizeof(T) == 4 ? DType::f32 : DType::f64);
}

template <class T>
T exp2_of(const char* isa, T t) {
  std::vector<T> in(64, t), out(64);
  kernels<T>(isa).exp2(in.data(), out.data(), 64);
  for (T x : out) EXPECT_EQ(std::memcmp(&x, &out[0], sizeof(T)), 0) << "lanes differ at " << t;
  return out[0];
}

// The largest power of two not above y > 0, a normal number.
double floor_power(double y) {
  uint64_t bits;
  std::memcpy(&bits, &y, 8);
  bits &= uint64_t{0x7FF} << 52;
  std::memcpy(&y, &bits, 8);
  return y;
}

// The largest error in units in the last place among the floats with these
// bits; infinite where a result under the normal range is neither 0 nor right.
double worst_ulp(const Kernels& kernels, uint32_t first, uint32_t step, const double* exact) {
  float in[kBlock], out[kBlock];
  for (int64_t i = 0; i < kBlock; ++i) {
    const uint32_t bits = first + uint32_t(i) * step;
    std::memcpy(&in[i], &bits, 4);
  }
  kernels.exp2(in, out, kBlock);
  double worst = 0;
  for (int64_t i = 0; i < kBlock; ++i) {
    const double error = std::abs(out[i] - exact[i]);
    const double ulp = std::max(floor_power(exact[i]), 0x1p-126) * 0x1p-23;
    const bool flushed = exact[i] < 0x1p-126 && out[i] == 0;
    if (!flushed && !(error / ulp <= worst)) worst = error / ulp;
  }
  return worst;
}

// Every float from 2^-26 to 127, of both signs; below that 2^t is 1, and one
// float of 1009 is tried.
TEST(Exp2, EveryFloat) {
  std::vector<Kernels> all;
  for (const char* isa : supported_isas()) all.push_back(kernels<float>(isa));
  set_isa(supported_isas().front());
  std::vector<double> worst(all.size());
  const uint32_t from = (127 - 26) << 23, to = 0x42FE0000;  // bits of 2^-26 and 127
  for (uint32_t sign : {0u, 0x80000000u}) {
    for (uint32_t begin : {0u, from}) {
      const uint32_t end = begin ? to : from, step = (begin ? 1 : 1009) * (kQuick ? 101 : 1);
      const int64_t blocks = (int64_t(end) - begin) / (kBlock * step);
#pragma omp parallel for schedule(dynamic, 64)
      for (int64_t block = 0; block <= blocks; ++block) {
        // The last block ends at `end` and overlaps the one before.
        const uint32_t first = block < blocks ? begin + uint32_t(block * kBlock) * step
                                              : end - uint32_t(kBlock - 1) * step;
        double exact[kBlock];
        for (int64_t i = 0; i < kBlock; ++i) {
          const uint32_t bits = (first + uint32_t(i) * step) | sign;
          float t;
          std::memcpy(&t, &bits, 4);
          exact[i] = std::exp2(double(t));
        }
        for (size_t k = 0; k < all.size(); ++k) {
          const double ulp = worst_ulp(all[k], first | sign, step, exact);
#pragma omp critical
          if (!(ulp <= worst[k])) worst[k] = ulp;
        }
      }
    }
  }
  for (size_t k = 0; k < all.size(); ++k) {
    EXPECT_LE(worst[k], 2) << supported_isas()[k];
    RecordProperty(std::string("worst_ulp_") + supported_isas()[k], std::to_string(worst[k]));
  }
}

class Exp2Test : public IsaTest {};

QKV_FOR_EACH_ISA(Exp2Test);

TEST_P(Exp2Test, SampledDoubles) {
  Random random(1);
  const Kernels& k = kernels<double>(GetParam());
  double worst = 0, in[kBlock], out[kBlock];
  for (int block = 0; block < (kQuick ? 50 : 1000); ++block) {
    std::uniform_real_distribution<double> small(-1, 1), large(-1022, 1023);
    for (double& t : in) t = block % 2 ? small(random) : large(random);
    k.exp2(in, out, kBlock);
    for (int64_t i = 0; i < kBlock; ++i) {
      const long double exact = std::exp2((long double)in[i]);
      const double ulp = floor_power(double(exact)) * 0x1p-52;
      worst = std::max(worst, double(std::abs(out[i] - exact)) / ulp);
    }
  }
  EXPECT_LE(worst, 2);
  RecordProperty("worst_ulp", std::to_string(worst));
}

template <class T>
void expect_edges(const char* isa, int lowest, int highest) {
  for (int n = lowest; n <= highest; ++n) EXPECT_EQ(exp2_of<T>(isa, T(n)), std::ldexp(T(1), n));
  const T inf = std::numeric_limits<T>::infinity();
  for (T t : {-inf, std::numeric_limits<T>::lowest(), T(lowest - 1), T(lowest - 1.75), T(-1e6)})
    EXPECT_EQ(exp2_of<T>(isa, t), 0) << t;
  EXPECT_TRUE(std::isnan(exp2_of<T>(isa, std::numeric_limits<T>::quiet_NaN())));
  EXPECT_TRUE(std::isnan(exp2_of<T>(isa, -std::numeric_limits<T>::quiet_NaN())));
  EXPECT_EQ(exp2_of<T>(isa, T(-0.0)), 1);
}

TEST_P(Exp2Test, IntegersAndEdges) {
  expect_edges<float>(GetParam(), -126, 127);
  expect_edges<double>(GetParam(), -1022, 1023);
}

}  // namespace
}  // namespace qkv::test
