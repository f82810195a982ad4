#include "kernels/prelude.h"

#if defined(__aarch64__)

#define QKV_ISA neon

#include "isa/neon/vec.h"
#include "parts/entry.h"

namespace qkv {
namespace {

const bool added = add_parts({"neon", &neon::kParts<float>, &neon::kParts<double>, nullptr});

}  // namespace
}  // namespace qkv

#endif
