#include "kernels/prelude.h"

#if defined(__x86_64__)

#define QKV_ISA avx2
QKV_TARGET_BEGIN("avx2,fma,f16c")

#include "isa/avx2/vec.h"
#include "parts/entry.h"

QKV_TARGET_END

namespace qkv {
namespace {

const bool added = add_parts({"avx2", &avx2::kParts<float>, &avx2::kParts<double>, nullptr});

}  // namespace
}  // namespace qkv

#endif
