#include "kernels/prelude.h"

// As in emulated/: these functions are called in this file only.
#pragma GCC diagnostic ignored "-Wpsabi"

#define QKV_ISA emulated_amx
#define QKV_PAIRS
#define QKV_TILES

#include "emulated/tiles.h"
#include "emulated/vec.h"
#include "parts/entry.h"

namespace qkv {
namespace {

const bool added = add_parts({"emulated_amx", nullptr, nullptr, &emulated_amx::kParts<BFloat16>});

}  // namespace
}  // namespace qkv
