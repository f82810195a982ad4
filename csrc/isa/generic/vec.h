// Vectors of 16 bytes without a single instruction of ours: the compiler makes SSE2 of them on any
// x86-64, and scalar code where there are no vectors.
#pragma once

#ifndef QKV_ISA  // this header is opened first
#include "kernels/prelude.h"
#define QKV_ISA generic
#endif

#include "kernels/fixed_bits.h"

namespace qkv::QKV_ISA {

#if defined(__FP_FAST_FMAF) && defined(__FP_FAST_FMA)
constexpr bool kHasFma = true;
#else
constexpr bool kHasFma = kFixedBits;  // by the C library's functions: slow, and right
#endif
constexpr int kRegisters = 16;  // for vectors
constexpr int kVectorBytes = 16;
// The most rows of a micro-kernel that is one vector wide, and of one of two. Without FMA a product
// needs a register of its own: of 16 registers, 4 x 2 are accumulators, two are vectors of B, one
// is a broadcast of A, and the others hold products.
constexpr int kMaxRows[2] = {8, 4};
// How many vectors' exponentials are computed in step (kernels/simd/exp.h).
constexpr int kVectorsInStep = 2;
// Whether there is a native_look_up() (kernels/simd/exp_table.h).
constexpr bool kLooksUp = false;

}  // namespace qkv::QKV_ISA

#include "isa/generic/functions.h"
