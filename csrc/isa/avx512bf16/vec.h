// AVX-512 with AVX512-BF16, whose instruction multiplies pairs of bf16 in vectors.
#pragma once

#ifndef QKV_ISA  // this header is opened by itself (kernels/simd/vec.h)
#include "kernels/prelude.h"
#define QKV_ISA avx512bf16
#endif

#include "isa/avx512/vec.h"
#include "isa/avx512bf16/leaves.h"

#define QKV_PAIRS
