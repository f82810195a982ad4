#include "kernels/prelude.h"

#if defined(__x86_64__)

#define QKV_ISA avx512bf16
QKV_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")

#include "isa/avx512bf16/vec.h"
#include "parts/entry.h"

QKV_TARGET_END

namespace qkv {
namespace {

const bool added = add_parts({"avx512bf16", nullptr, nullptr, &avx512bf16::kParts<BFloat16>});

}  // namespace
}  // namespace qkv

#endif
