#include "kernels/prelude.h"

#if defined(__x86_64__)

#define QKV_ISA avx512
QKV_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")

#include "isa/avx512/vec.h"
#include "kernels/entry.h"

QKV_TARGET_END

namespace qkv {

const Implementation kAvx512 = avx512::complete("avx512", [] {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
});

}  // namespace qkv

#endif
