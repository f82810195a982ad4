#include "kernels/prelude.h"

// These vectors stay inside this file.
#pragma GCC diagnostic ignored "-Wpsabi"

#define QKV_ISA emulated_amx
#define QKV_PAIR_GEMM "kernels/amx_gemm.h"

#include "emulated/tiles.h"  // second
#include "emulated/vec.h"    // first

#include "kernels/all.h"

namespace qkv {
namespace {

const Implementation kEmulated = {
    "emulated_amx", [] { return true; }, {}, {}, emulated_amx::pair_kernels(), {}, &kGeneric};

const bool added = (add_implementation(kEmulated), true);

}  // namespace
}  // namespace qkv
