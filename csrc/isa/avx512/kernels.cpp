#include "kernels/prelude.h"

#if defined(__x86_64__)

#define QKV_ISA QKV_KERNELS(avx512)
QKV_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")

#include "isa/avx512/vec.h"
#include "kernels/entry.h"

QKV_TARGET_END

namespace qkv {

const Implementation QKV_KERNELS(kAvx512) =
    QKV_ISA::complete("avx512", QKV_FIXED_BITS_OF(kAvx512), [] {
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    });

}  // namespace qkv

#endif
