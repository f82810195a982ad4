#include "kernels/prelude.h"

#if defined(__x86_64__)

#define QKV_ISA amx
QKV_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")

#include "isa/amx/vec.h"
#include "parts/entry.h"

QKV_TARGET_END

namespace qkv {
namespace {

const bool added = add_parts({"amx", nullptr, nullptr, &amx::kParts<BFloat16>});

}  // namespace
}  // namespace qkv

#endif
