#include "kernels/prelude.h"

#if defined(__aarch64__)

#define QKV_ISA neon

// vec.h defines the vector types that all other headers use. The empty line keeps clang-format from
// sorting it behind them.
#include "isa/neon/vec.h"

#include "kernels/all.h"

namespace qkv {

const Implementation kNeon = {"neon",
                              [] { return true; },
                              neon::kernels_of<float>(),
                              neon::kernels_of<double>(),
                              neon::kernels_of<BFloat16>(),
                              neon::kernels_of<Float16>()};

}  // namespace qkv

#endif
