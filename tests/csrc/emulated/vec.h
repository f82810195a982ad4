// AVX-512's vectors and AVX512-BF16's instructions, on any CPU.
// No register holds one.
#undef QKV_VECTOR_REGISTER
#define QKV_VECTOR_REGISTER "+m"

namespace qkv::QKV_ISA {

#if defined(__FP_FAST_FMAF) && defined(__FP_FAST_FMA)
constexpr bool kHasFma = true;
#else
constexpr bool kHasFma = false;
#endif
constexpr int kVectorBytes = 64;
constexpr int kMaxRows[2] = {14, 14};
constexpr int kVectorsInStep = 8;

// A bf16 in the upper half of 32 bits is an f32.
template <class V, class Pairs>
QKV_INLINE V native_dot_pairs(V sum, Pairs a, Pairs b) {
  sum += (V)(a & 0xffff0000) * (V)(b & 0xffff0000);
  return sum + (V)(a << 16) * (V)(b << 16);
}

typedef uint16_t Narrow __attribute__((vector_size(kVectorBytes)));
template <class V>
QKV_INLINE Narrow native_narrow(V low, V high) {
  constexpr int kHalf = kVectorBytes / 4;
  Narrow narrow{};
  for (int i = 0; i < kHalf; ++i) {
    narrow[i] = qkv::narrow<BFloat16>(low[i]).bits;
    narrow[kHalf + i] = qkv::narrow<BFloat16>(high[i]).bits;
  }
  return narrow;
}

}  // namespace qkv::QKV_ISA

#include "isa/generic/functions.h"
