#include "kernels/prelude.h"

#if defined(__x86_64__)

#include "dispatch/cpuid.h"

#define QKV_ISA avx2
QKV_TARGET_BEGIN("avx2,fma,f16c")

#include "isa/avx2/vec.h"
#include "kernels/entry.h"

QKV_TARGET_END

namespace qkv {

const Implementation kAvx2 = avx2::complete("avx2", [] {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         cpu_has_f16c();  // its registers are AVX2's
});

}  // namespace qkv

#endif
