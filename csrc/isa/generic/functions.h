// What vec.h says of an instruction set, with nothing but vector extensions: for vectors
// of any size.
namespace qkv::QKV_ISA {

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
  if constexpr (sizeof(V) == 16) return (V)_mm_mul_epu32((__m128i)a, (__m128i)b);
#endif
  return (a & 0xffffffff) * (b & 0xffffffff);
}

// As many bytes as there are lanes, widened.
template <class I>
QKV_INLINE I native_widen(const uint8_t* p, I wide) {
  QKV_UNROLL
  for (size_t i = 0; i < sizeof(wide) / sizeof(wide[0]); ++i) wide[i] = p[i];
  return wide;
}

// IEEE binary16 and back, to the nearest: half.h's way, lane by lane.
typedef uint16_t Half16 __attribute__((vector_size(kVectorBytes / 2)));
typedef uint32_t Bits32 __attribute__((vector_size(kVectorBytes)));
typedef float Float32 __attribute__((vector_size(kVectorBytes)));
typedef int32_t Int32 __attribute__((vector_size(kVectorBytes)));
QKV_INLINE Int32 native_widen(Half16 x) { return __builtin_convertvector(x, Int32); }
QKV_INLINE Float32 native_widen_f16(Half16 x) {
  const Bits32 bits = __builtin_convertvector(x, Bits32), magnitude = bits & 0x7fff;
  const Bits32 special = 0x7f800000 | (magnitude & 0x3ff) << 13;
  const Bits32 value = (Bits32)((Float32)(magnitude << 13) * 0x1p112f);
  return (Float32)((bits & 0x8000) << 16 | (magnitude >= 0x7c00 ? special : value));
}
QKV_INLINE Half16 native_narrow_f16(Float32 x) {
  const Bits32 bits = (Bits32)x, magnitude = bits & 0x7fffffff;
  const Bits32 subnormal = (Bits32)((Float32)magnitude + 0.5f) - 0x3f000000;
  const Bits32 normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  const Bits32 infinite = Bits32{} + 0x7c00, nan = Bits32{} + 0x7e00;
  Bits32 half = magnitude < 0x38800000 ? subnormal : normal;
  half = magnitude >= 0x477ff000 ? infinite : half;
  half = magnitude > 0x7f800000 ? nan : half;
  return __builtin_convertvector(half | (bits >> 16 & 0x8000), Half16);
}

}  // namespace qkv::QKV_ISA
