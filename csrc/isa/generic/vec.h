// Whatever the compiler makes of 16-byte vectors: SSE2 on any x86-64, scalar
// code where there are none.
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

}  // namespace qkv::QKV_ISA

#include "isa/generic/functions.h"
