#include "kernels/prelude.h"

#if defined(__x86_64__)

#define QKV_ISA avx512
QKV_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")

#include "isa/avx512/vec.h"
#include "parts/entry.h"

QKV_TARGET_END

namespace qkv {
namespace {

const bool added = add_parts({"avx512", &avx512::kParts<float>, &avx512::kParts<double>, nullptr});

}  // namespace
}  // namespace qkv

#endif
