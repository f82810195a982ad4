#include "kernels/prelude.h"

#if defined(__x86_64__)

#include "dispatch/cpuid.h"

#define QKV_ISA QKV_KERNELS(avx2)
QKV_TARGET_BEGIN("avx2,fma,f16c")

#include "isa/avx2/vec.h"
#include "kernels/entry.h"

QKV_TARGET_END

namespace qkv {

const Implementation QKV_KERNELS(kAvx2) = QKV_ISA::complete("avx2", QKV_FIXED_BITS_OF(kAvx2), [] {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         cpu_has_f16c();  // its registers are AVX2's
});

}  // namespace qkv

#endif
