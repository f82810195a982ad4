#include "probe_loops.h"

#include <stdexcept>
#include <string>

#include "dispatch/dispatch.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace qkv {
namespace {

// How many chains of dependent multiply-adds run side by side, so that no pipe waits: two pipes
// times the longest latency of a fused multiply-add or of vdpbf16ps (6 cycles). It is also enough
// for a multiply and an add on four pipes, and leaves registers for two constants where there are
// 16.
constexpr int kChains = 12;

// The result of a loop is stored here, so that the compiler cannot drop the loop.
volatile double sink;

// A loop over `a`, each of some chains, that is unrolled: they are in registers.
#define QKV_EACH(chains) _Pragma("GCC unroll 16") for (auto& a : chains)

// Defines a loop of kChains independent chains a = a * x + y, which settle at 2 and so are never
// subnormal or infinite. x and y are read from volatiles, so that the compiler does not know them.
// Every instruction set has the same body, but a function of its own, because a target attribute
// only reaches the code inside its function.
#define QKV_DEFINE_MULTIPLY_ADD_LOOP(name, target_attribute, vector_bytes)             \
  template <typename T>                                                                \
  target_attribute void name(int64_t iterations) {                                     \
    typedef T Vec __attribute__((vector_size(vector_bytes)));                          \
    volatile T half = 0.5, one = 1;                                                    \
    const Vec x = Vec{} + half, y = Vec{} + one;                                       \
    Vec chains[kChains], sum{};                                                        \
    QKV_EACH(chains) a = y;                                                            \
    for (int64_t i = 0; i < iterations; ++i) {                                         \
      QKV_EACH(chains) {                                                               \
        a = a * x + y;                                                                 \
        asm volatile("" : QKV_KEEP(a)); /* equal chains must not be merged into one */ \
      }                                                                                \
    }                                                                                  \
    QKV_EACH(chains) sum += a;                                                         \
    sink = sum[0];                                                                     \
  }

#if defined(__x86_64__)
#define QKV_KEEP(vec) "+v"(vec)  // any vector register
QKV_DEFINE_MULTIPLY_ADD_LOOP(loop_avx512, __attribute__((target("avx512f"))), 64)
QKV_DEFINE_MULTIPLY_ADD_LOOP(loop_avx2, __attribute__((target("avx2,fma"))), 32)

// kChains chains a += x.first * x.first + x.second * x.second, where x is a pair of bf16 ones: a
// grows by 2 up to 2^25, and stays there.
__attribute__((target("avx512f,avx512bf16"))) void loop_vdpbf16ps(int64_t iterations) {
  const __m512i x = _mm512_set1_epi16(0x3f80);
  __m512 chains[kChains] = {};
  for (int64_t i = 0; i < iterations; ++i) {
    QKV_EACH(chains) asm volatile("vdpbf16ps %1, %1, %0" : "+v"(a) : "v"(x));
  }
}

constexpr int kTileRows = 16, kTileRowBytes = 64, kTilePairs = 16;
constexpr int kTileFlops = kTileRows * 16 * kTilePairs * 2 * 2;

// Four of AMX's tiles are sums, and each adds the product of one of two tiles on the left and one
// of two on the right, as in a product of matrices. Linux must have permitted tiles to the process,
// which supported_isas() asks for.
__attribute__((target("amx-tile,amx-bf16"))) void loop_tdpbf16ps(int64_t iterations) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = kTileRowBytes;
    config.rows[tile] = kTileRows;
  }
  alignas(64) uint16_t ones[kTileRows * kTileRowBytes / 2];
  for (uint16_t& one : ones) one = 0x3f80;
  // The compiler does not know that the intrinsics read all of these.
  asm volatile("" : : "r"(&config), "r"(ones) : "memory");
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, ones, kTileRowBytes);
  _tile_loadd(5, ones, kTileRowBytes);
  _tile_loadd(6, ones, kTileRowBytes);
  _tile_loadd(7, ones, kTileRowBytes);
  for (int64_t i = 0; i < iterations; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}
#elif defined(__aarch64__)
#define QKV_KEEP(vec) "+w"(vec)

// The chains that keep four pipes busy if an FMLA takes four cycles.
constexpr int kNeonChains = 16;

// kNeonChains chains a += x * y: FMLA overwrites the number it adds to, so that a * x + y would
// take a copy of y each time. a grows by 1/2 until it is so large that 1/2 is rounded away.
template <typename T>
void loop_neon(int64_t iterations) {
  typedef T Vec __attribute__((vector_size(16)));
  volatile T half = 0.5, one = 1;
  const Vec x = Vec{} + half, y = Vec{} + one;
  Vec chains[kNeonChains] = {};
  for (int64_t i = 0; i < iterations; ++i) {
    QKV_EACH(chains) {
      if constexpr (sizeof(T) == 4) {
        a = vfmaq_f32(a, x, y);
      } else {
        a = vfmaq_f64(a, x, y);
      }
      asm volatile("" : QKV_KEEP(a));  // equal chains must not be merged into one
    }
  }
  QKV_EACH(chains) sink = a[0];
}
#else
#error "name this architecture's vector register constraint"
#endif
QKV_DEFINE_MULTIPLY_ADD_LOOP(loop_generic, , 16)

constexpr int fma_flops(int vector_bytes, int itemsize, int chains = kChains) {
  return chains * (vector_bytes / itemsize) * 2;
}

// The loops of every instruction set: for f32, for f64, and for half precision if it has products
// of it.
constexpr ProbeLoop kLoops[] = {
#if defined(__x86_64__)
    {"amx", DType::bf16, "tdpbf16ps", 4 * kTileFlops, loop_tdpbf16ps},
    {"amx", DType::f32, "FMA", fma_flops(64, 4), loop_avx512<float>},
    {"amx", DType::f64, "FMA", fma_flops(64, 8), loop_avx512<double>},
    {"avx512bf16", DType::bf16, "vdpbf16ps", kChains * 16 * 2 * 2, loop_vdpbf16ps},
    {"avx512bf16", DType::f32, "FMA", fma_flops(64, 4), loop_avx512<float>},
    {"avx512bf16", DType::f64, "FMA", fma_flops(64, 8), loop_avx512<double>},
    {"avx512", DType::f32, "FMA", fma_flops(64, 4), loop_avx512<float>},
    {"avx512", DType::f64, "FMA", fma_flops(64, 8), loop_avx512<double>},
    {"avx2", DType::f32, "FMA", fma_flops(32, 4), loop_avx2<float>},
    {"avx2", DType::f64, "FMA", fma_flops(32, 8), loop_avx2<double>},
#elif defined(__aarch64__)
    {"neon", DType::f32, "FMA", fma_flops(16, 4, kNeonChains), loop_neon<float>},
    {"neon", DType::f64, "FMA", fma_flops(16, 8, kNeonChains), loop_neon<double>},
#endif
    {"generic", DType::f32, "FMA", fma_flops(16, 4), loop_generic<float>},
    {"generic", DType::f64, "FMA", fma_flops(16, 8), loop_generic<double>},
};

const ProbeLoop* find(const std::string& isa, DType dtype) {
  for (const ProbeLoop& loop : kLoops) {
    if (isa == loop.isa && dtype == loop.dtype) return &loop;
  }
  return nullptr;
}

}  // namespace

const ProbeLoop& find_probe_loop(const char* isa, DType dtype) {
  const std::string wanted = isa;
  for (const char* supported : supported_isas()) {
    if (wanted != supported) continue;
    const ProbeLoop* loop = find(wanted, dtype);
    if (!loop) loop = find(wanted, compute_type(dtype));
    if (loop) return *loop;
  }
  throw std::invalid_argument("isa: this CPU has no probe for '" + wanted + "'");
}

}  // namespace qkv
