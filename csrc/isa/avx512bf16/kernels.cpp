#include "kernels/prelude.h"

#if defined(__x86_64__)

#define QKV_ISA avx512bf16
QKV_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")

#include "isa/avx512bf16/vec.h"
#include "kernels/entry.h"

QKV_TARGET_END

namespace qkv {

const Implementation kAvx512Bf16 = avx512bf16::of_pairs(
    "avx512bf16", [] { return kAvx512.supported() && __builtin_cpu_supports("avx512bf16"); },
    kAvx512);

}  // namespace qkv

#endif
