// The loop behind probe_peak (probe/): multiply-adds on registers, and nothing else.
#pragma once

#include "kernels/gemm/micro_kernel.h"

namespace qkv::QKV_ISA {

// How many chains of dependent multiply-adds run side by side, so that no pipe waits: two pipes
// times the longest latency of a fused multiply-add or of vdpbf16ps (6 cycles), which is also
// enough for a multiply and an add on four pipes, and leaves registers where there are 16; or four
// pipes times the four cycles of NEON's FMLA.
constexpr int kPeakChains = kRegisters > 16 ? 16 : 12;

// 1/2, or two of it.
template <class F>
F peak_factor() {
  if constexpr (std::is_same_v<F, Pair>)
    return {narrow<BFloat16>(0.5f), narrow<BFloat16>(0.5f)};
  else
    return F(0.5);
}

// Chains of F's products, which grow by 1/4 or 1/2 at a time or, without FMA, come near 1, and so
// are never subnormal or infinite. Returns one of their numbers, or the compiler would drop the
// loop.
template <class F, class T = Compute<F>>
double peak_loop(int64_t iterations) {
  const F factor = peak_factor<F>();
  Vec<F> x = broadcast<Vec<F>>(&factor);
  Vec<T> chains[kPeakChains], sum{};
  QKV_UNROLL
  for (int i = 0; i < kPeakChains; ++i) chains[i] = splat(T(i));  // equal ones would become one
  for (; iterations > 0; --iterations) {
    x = in_register(x);  // or what does not change would be multiplied once, before the loop
    QKV_UNROLL
    for (Vec<T>& a : chains) {
      if constexpr (std::is_same_v<F, Pair>)
        a = add_product(x, x, a, F{});
      else if constexpr (kHasFma)
        a = native_fma(x, x, a);
      else
        a = a * x + x;
    }
  }
  QKV_UNROLL
  for (const Vec<T>& a : chains) sum += a;
  return sum[0];
}

}  // namespace qkv::QKV_ISA
