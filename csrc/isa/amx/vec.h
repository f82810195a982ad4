// AVX-512 with AMX, which multiplies pairs of bf16 in tiles; AVX512-BF16 rounds to bf16.
#pragma once

#ifndef QKV_ISA  // this header is opened by itself (kernels/simd/vec.h)
#include "kernels/prelude.h"
#define QKV_ISA amx
#endif

#include "isa/amx/tiles.h"
#include "isa/avx512bf16/vec.h"

#define QKV_TILES
