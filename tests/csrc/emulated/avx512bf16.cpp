#include "emulated/twins.h"
#include "kernels/prelude.h"

// -Wpsabi warns of vectors in arguments of functions, whose registers follow the instruction set.
// These functions are called in this file only.
#pragma GCC diagnostic ignored "-Wpsabi"

#define QKV_ISA emulated_avx512bf16
#define QKV_PAIRS

#include "emulated/vec.h"
#include "kernels/entry.h"

namespace qkv {
namespace {

const Implementation kEmulated =
    emulated_avx512bf16::of_pairs("emulated_avx512bf16", [] { return true; }, kGeneric);

const bool added = (add_implementation(kEmulated), twins().push_back(kEmulated.name), true);

}  // namespace
}  // namespace qkv
