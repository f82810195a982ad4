#include "kernels/prelude.h"

#if defined(__x86_64__)

// GCC 12 warns of the undefined operand inside its own intrinsics.
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define QKV_ISA avx512
QKV_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")

#include "isa/avx512/vec.h"
#include "kernels/entry.h"

QKV_TARGET_END

namespace qkv {

const Implementation kAvx512 = {"avx512",
                                [] {
                                  return __builtin_cpu_supports("avx512f") &&
                                         __builtin_cpu_supports("avx512bw") &&
                                         __builtin_cpu_supports("avx512dq") &&
                                         __builtin_cpu_supports("avx512vl");
                                },
                                avx512::kernels_of<float>(),
                                avx512::kernels_of<double>(),
                                avx512::kernels_of<BFloat16>(),
                                avx512::kernels_of<Float16>()};

}  // namespace qkv

#endif
