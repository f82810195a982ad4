#include "emulated/twins.h"
#include "kernels/prelude.h"

// -Wpsabi warns of vectors in arguments of functions, whose registers follow the instruction set.
// These functions are called in this file only.
#pragma GCC diagnostic ignored "-Wpsabi"

#define QKV_ISA emulated_amx
#define QKV_PAIRS
#define QKV_TILES

#include "emulated/tiles.h"
#include "emulated/vec.h"
#include "kernels/entry.h"

namespace qkv {
namespace {

const Implementation kEmulated =
    emulated_amx::of_pairs("emulated_amx", [] { return true; }, kGeneric);

const bool added = (add_implementation(kEmulated), twins().push_back(kEmulated.name), true);

}  // namespace
}  // namespace qkv
