// Products of matrices, gemm<E>: of elements, and of pairs of bf16 where the instruction set
// multiplies them. Such an instruction set defines QKV_PAIR_GEMM, the header that does.
#pragma once

#include "kernels/gemm/tile_gemm.h"
#ifdef QKV_PAIR_GEMM
#include QKV_PAIR_GEMM
#else
namespace qkv::QKV_ISA {

// These two are what they are in pair_gemm.h.
constexpr bool kTiles = false;
constexpr int kProductRows = kMaxRows[1];

}  // namespace qkv::QKV_ISA
#endif
