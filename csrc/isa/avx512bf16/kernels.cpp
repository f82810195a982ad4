#include "kernels/prelude.h"

#if defined(__x86_64__)

// GCC 12 warns of the undefined operand inside its own intrinsics.
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define QKV_ISA avx512bf16
#define QKV_PAIR_GEMM "kernels/gemm/pair_gemm.h"
QKV_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")

// vec.h defines the vector types that the headers below use. The empty lines keep clang-format from
// sorting it behind them.
#include "isa/avx512/vec.h"

#include "isa/avx512bf16/leaves.h"

#include "kernels/all.h"

QKV_TARGET_END

namespace qkv {

const Implementation kAvx512Bf16 = {
    "avx512bf16",
    [] { return kAvx512.supported() && __builtin_cpu_supports("avx512bf16"); },
    {},
    {},
    avx512bf16::pair_kernels(),
    {},
    &kAvx512};

}  // namespace qkv

#endif
