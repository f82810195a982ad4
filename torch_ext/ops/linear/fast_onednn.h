// The CPUs on which products of float32 were measured to be faster by oneDNN than by MKL.
#pragma once

#ifdef __x86_64__
#include <cpuid.h>
#endif

#include <cstdint>

namespace qkv::ops {

// Products of fewer multiplications than this stay with MKL everywhere: a call of oneDNN takes some
// 12 microseconds longer, which is more than the Zen 4 gains on them.
constexpr int64_t kWorthOnednn = int64_t(1) << 25;

// What oneDNN makes faster: products of [rows, K] by [K, N], with the weight laid out either way,
// which are outputs and gradients of inputs; and gradients of weights, of which it copies both
// factors first.
struct FastOnednn {
  bool outputs = false, weights = false;
};

// Zen 4 (family 25, model 17, two cores): outputs 1.09 to 1.18 times MKL for 256 to 4096 rows and
// widths of 384 to 2304; gradients of weights 0.69 to 0.95. Zen 5 (family 26, model 2, two cores):
// outputs 1.9 to 2.5 times MKL for 512 to 16384 rows and widths of 256 to 3072, gradients of inputs
// 1.8 to 2.8, of weights 1.1 to 2.0. An Intel Xeon with AMX, 2 and 16 threads: outputs 0.82
// to 1.07.
inline FastOnednn fast_onednn() {
#ifdef __x86_64__
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kAuthenticAmd = 0x68747541;  // "Auth", the first letters of the vendor
  if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx) || ebx != kAuthenticAmd) return {};
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return {};
  const unsigned family = (eax >> 8 & 15) + (eax >> 20 & 255);
  const unsigned model = (eax >> 4 & 15) | (eax >> 12 & 240);
  const bool zen4 = family == 25 && ((model >= 0x10 && model < 0x20) ||
                                     (model >= 0x60 && model < 0x80) || model >= 0xa0);
  const bool zen5 = family == 26;
  return {zen4 || zen5, zen5};
#else
  return {};
#endif
}

}  // namespace qkv::ops
