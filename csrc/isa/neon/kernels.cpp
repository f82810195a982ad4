#include "kernels/prelude.h"

#if defined(__aarch64__)

#define QKV_ISA neon

#include "isa/neon/vec.h"
#include "kernels/entry.h"

namespace qkv {

const Implementation kNeon = {"neon",
                              [] { return true; },
                              neon::kernels_of<float>(),
                              neon::kernels_of<double>(),
                              neon::kernels_of<BFloat16>(),
                              neon::kernels_of<Float16>()};

}  // namespace qkv

#endif
