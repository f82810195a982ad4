#include "kernels/prelude.h"

#define QKV_ISA generic

#include "isa/generic/vec.h"
#include "parts/entry.h"

namespace qkv {
namespace {

const bool added =
    add_parts({"generic", &generic::kParts<float>, &generic::kParts<double>, nullptr});

}  // namespace
}  // namespace qkv
