// Whatever the compiler makes of 16-byte vectors: SSE2 on any x86-64, NEON on
// AArch64, scalar code elsewhere.
namespace qkv::QKV_ISA {

#if defined(__FP_FAST_FMAF) && defined(__FP_FAST_FMA)
constexpr bool kHasFma = true;
#else
constexpr bool kHasFma = false;
#endif
constexpr int kVectorBytes = 16;
// Without FMA a product needs a register of its own: 4 x 2 accumulators, two of
// B, a broadcast of A and products in flight, of 16 registers.
constexpr int kMaxRows[2] = {8, 4};
// Vectors whose exponentials are computed in step.
constexpr int kVectorsInStep = 2;

// The larger lane by lane: b if either is NaN.
template <class V>
QKV_INLINE V native_max(V a, V b) {
  return a > b ? a : b;
}

// a * b + c, where kHasFma: contracted by the compiler.
template <class V>
QKV_INLINE V native_fma(V a, V b, V c) {
  return a * b + c;
}

// The products of the low 32 bits of lanes of 64.
template <class V>
QKV_INLINE V native_mul_low(V a, V b) {
#if defined(__SSE2__)
  return (V)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & 0xffffffff) * (b & 0xffffffff);
#endif
}

// As many bytes as there are lanes, widened.
template <class I>
QKV_INLINE I native_widen(const uint8_t* p, I wide) {
  QKV_UNROLL
  for (size_t i = 0; i < sizeof(wide) / sizeof(wide[0]); ++i) wide[i] = p[i];
  return wide;
}

}  // namespace qkv::QKV_ISA
