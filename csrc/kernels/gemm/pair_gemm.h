// Products of pairs by vector instructions: gemm<Pair> is the micro-kernel of tile_gemm.h with E =
// Pair. The other way is amx_gemm.h.
#pragma once

#ifndef QKV_ISA  // this header is opened by itself (kernels/simd/vec.h)
#include "isa/avx512bf16/vec.h"
#endif

#include "kernels/gemm/tile_gemm.h"

namespace qkv::QKV_ISA {

// Whether A is read in tiles, and so must have a_col = 1: neighbours along the depth side by side.
constexpr bool kTiles = false;

// How many rows of A a product takes at once.
constexpr int kProductRows = kMaxRows[1];

struct PairUnit {
  explicit PairUnit(bool) {}
};

}  // namespace qkv::QKV_ISA
