// Products of matrices, gemm<E>: of elements, and of pairs of bf16 where the instruction set
// multiplies them and so defines QKV_PAIRS. Pairs go through the micro-kernel, as elements do, or,
// with QKV_TILES, through AMX's tiles.
#pragma once

#include "kernels/gemm/tile_gemm.h"
#ifdef QKV_TILES
#include "kernels/gemm/amx_gemm.h"
#else
namespace qkv::QKV_ISA {

// Whether A is read in tiles, and so must have a_col = 1: neighbours along the depth side by side.
constexpr bool kTiles = false;

// How many rows of A a product takes at once.
constexpr int kProductRows = kMaxRows[1];

// Must live in a thread as long as something is multiplied there. It is told whether anything will
// be: while an arena only counts, nothing is.
struct ProductUnit {
  explicit ProductUnit(bool) {}

  // A loop between products must call this with the number of vectors that it has worked on, each
  // by some ten instructions.
  static void keep_awake(int64_t) {}
};

}  // namespace qkv::QKV_ISA
#endif
