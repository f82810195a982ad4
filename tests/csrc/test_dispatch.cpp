// Which instruction set runs, and how a caller or the environment decides it.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <stdexcept>
#include <string>

#include "attention.h"
#include "dispatch/dispatch.h"
#if defined(__x86_64__)
#include "dispatch/cpuid.h"
#endif

namespace qkv {
namespace {

std::vector<std::string> supported() {
  const auto names = supported_isas();
  return {names.begin(), names.end()};
}

template <class Set>
std::string error_of(const Set& set, const char* name) {
  try {
    set(name);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(Dispatch, SupportedAreListedBestFirst) {
  std::vector<std::string> best_first = {"amx", "avx512bf16", "avx512", "avx2", "neon", "generic"};
#if defined(__x86_64__)
  // Intel's CPUs multiply bf16 at half the rate of f32 in vectors, also where a virtual machine
  // hides AMX (dispatch.cpp).
  if (__builtin_cpu_is("intel") && !__builtin_cpu_is("cooperlake"))
    std::swap(best_first[1], best_first[2]);
#endif
  const auto names = supported();
  ASSERT_FALSE(names.empty());
  EXPECT_EQ(names.back(), "generic");  // which any CPU can run
  auto at = best_first.begin();
  for (const std::string& name : names) {
    at = std::find(at, best_first.end(), name);
    ASSERT_NE(at, best_first.end()) << name << " is unknown, twice there or out of order";
    ++at;
  }
}

TEST(Dispatch, FollowsTheCpu) {
#if defined(__x86_64__)
  const auto names = supported();
  const auto has = [&](const char* name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  EXPECT_EQ(has("avx2"), __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
  EXPECT_LE(has("avx512"), __builtin_cpu_supports("avx512f") != 0);
  EXPECT_EQ(has("avx512bf16"), has("avx512") && __builtin_cpu_supports("avx512bf16"));
  EXPECT_LE(has("amx"), has("avx512bf16") && cpu_has_amx_bf16());
#elif defined(__aarch64__)
  EXPECT_EQ(supported().front(), "neon");
#endif
}

TEST(Dispatch, SetIsaChangesTheActiveOne) {
  for (const std::string& name : supported()) {
    set_isa(name.c_str());
    EXPECT_EQ(active_isa(), name);
  }
  set_isa(supported_isas().front());
}

TEST(Dispatch, SetIsaRefusesWhatIsUnknownAndChangesNothing) {
  set_isa("generic");
  const std::string error = error_of(set_isa, "sse9");
  EXPECT_NE(error.find("sse9"), std::string::npos) << error;
  for (const std::string& name : supported())
    EXPECT_NE(error.find(name), std::string::npos) << error << " does not offer " << name;
  EXPECT_NE(error_of(set_isa, ""), "");
  EXPECT_STREQ(active_isa(), "generic");
  set_isa(supported_isas().front());
}

#if defined(__x86_64__)  // elsewhere these names are unknown
TEST(Dispatch, SetIsaRefusesWhatThisCpuCannotRun) {
  const auto names = supported();
  for (const char* name : {"avx512bf16", "amx", "avx512", "avx2"}) {
    if (std::find(names.begin(), names.end(), name) != names.end()) continue;
    const std::string error = error_of(set_isa, name);
    EXPECT_NE(error.find(name), std::string::npos) << error;
    EXPECT_NE(error.find("CPU"), std::string::npos) << error;
  }
}
#endif

// The output of DISABLED_Child in a process of its own, which `environment` starts: "QKV_ISA=avx2",
// for one.
std::string child_output(const std::string& environment) {
  char self[4096] = {};
  EXPECT_GT(readlink("/proc/self/exe", self, sizeof(self) - 1), 0);
  const std::string command = "env -u GTEST_TOTAL_SHARDS -u GTEST_SHARD_INDEX " + environment +
                              " " QKV_TEST_EMULATOR " '" + self +
                              "' --gtest_filter=Dispatch.DISABLED_Child"
                              " --gtest_also_run_disabled_tests 2>&1";
  std::string output;
  FILE* pipe = popen(command.c_str(), "r");
  for (int c; (c = std::fgetc(pipe)) != EOF;) output += char(c);
  pclose(pipe);
  const size_t begin = output.find("{"), end = output.find("}");
  if (begin == std::string::npos || end == std::string::npos) return "no answer in: " + output;
  return output.substr(begin + 1, end - begin - 1);
}

// This is no test: the tests below run it in another process.
TEST(Dispatch, DISABLED_Child) {
  try {
    const std::string isa = active_isa(), products = half_products();
    std::cout << "{" << isa << (products == "native" ? "" : " " + products) << "}\n";
  } catch (const std::invalid_argument& error) {
    std::cout << "{invalid_argument " << error.what() << "}\n";
  }
}

TEST(Dispatch, TheBestIsTheDefault) {
  EXPECT_EQ(child_output("env -u QKV_ISA"), supported().front());
  EXPECT_EQ(child_output("QKV_ISA="), supported().front());
}

TEST(Dispatch, TheEnvironmentForcesOne) {
  for (const std::string& name : supported()) EXPECT_EQ(child_output("QKV_ISA=" + name), name);
}

TEST(Dispatch, TheEnvironmentCannotForceNonsense) {
  const std::string output = child_output("QKV_ISA=sse9");
  EXPECT_EQ(output.find("invalid_argument"), 0u) << output;
  EXPECT_NE(output.find("QKV_ISA"), std::string::npos) << output;
  EXPECT_NE(output.find("sse9"), std::string::npos) << output;
}

TEST(HalfProducts, AreSetByName) {
  EXPECT_STREQ(half_products(), "native");
  set_half_products("float32");
  EXPECT_STREQ(half_products(), "float32");
  const std::string error = error_of(set_half_products, "f32");
  EXPECT_NE(error.find("'f32', expected one of: native, float32"), std::string::npos) << error;
  EXPECT_STREQ(half_products(), "float32");
  set_half_products("native");
}

TEST(HalfProducts, TheEnvironmentSetsThem) {
  EXPECT_EQ(child_output("QKV_ISA=generic QKV_HALF_PRODUCTS=float32"), "generic float32");
  EXPECT_EQ(child_output("QKV_ISA=generic QKV_HALF_PRODUCTS="), "generic");
  const std::string output = child_output("QKV_HALF_PRODUCTS=fp32");
  EXPECT_EQ(output.find("invalid_argument QKV_HALF_PRODUCTS"), 0u) << output;
}

}  // namespace
}  // namespace qkv
