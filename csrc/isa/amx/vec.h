// AVX-512 with AMX, which multiplies pairs of bf16 in tiles; AVX512-BF16 rounds to bf16.
#pragma once

#ifndef QKV_ISA  // this header is opened by itself (kernels/simd/vec.h)
#include "kernels/prelude.h"
#define QKV_ISA amx
#endif

#include "isa/avx512bf16/vec.h"

#define QKV_TILES

namespace qkv::QKV_ISA {

// Eight registers of 16 rows of 64 bytes, which are called tiles here and in
// kernels/gemm/amx_gemm.h. These functions stand in for the compiler's macros, which take nothing
// but literal numbers, and do not say that a load reads memory.
struct Tiles {
  // Sets all eight registers to their full size and to zeros. Until release() the state that the
  // system saves for this thread is 8 KiB larger.
  static QKV_INLINE void configure() {
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    static_assert(sizeof config == 64);
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  static QKV_INLINE void release() { asm volatile("tilerelease" ::: "memory"); }

  template <int tile>
  static QKV_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
  }
  template <int tile>
  static QKV_INLINE void load(const void* p, int64_t row_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(row_bytes), "i"(tile) : "memory");
  }
  template <int tile>
  static QKV_INLINE void store(void* p, int64_t row_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(row_bytes), "i"(tile) : "memory");
  }
  // sum[i][j] += a[i][k].first * b[k][j].first + a[i][k].second * b[k][j].second over k
  template <int sum, int a, int b>
  static QKV_INLINE void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(a), "i"(b));
  }
};

}  // namespace qkv::QKV_ISA
