#include "kernels/prelude.h"

// As in emulated/: these functions are called in this file only.
#pragma GCC diagnostic ignored "-Wpsabi"

#define QKV_ISA emulated_avx512bf16
#define QKV_PAIRS

#include "emulated/vec.h"
#include "parts/entry.h"

namespace qkv {
namespace {

const bool added =
    add_parts({"emulated_avx512bf16", nullptr, nullptr, &emulated_avx512bf16::kParts<BFloat16>});

}  // namespace
}  // namespace qkv
