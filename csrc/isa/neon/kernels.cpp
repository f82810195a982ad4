#if defined(__aarch64__)

#include "kernels/prelude.h"

#define QKV_ISA QKV_KERNELS(neon)

#include "isa/neon/vec.h"
#include "kernels/entry.h"

namespace qkv {

const Implementation QKV_KERNELS(kNeon) = QKV_ISA::complete("neon", QKV_FIXED_BITS_OF(kNeon),
                                                            [] { return true; });

}  // namespace qkv

#endif
