#include "kernels/prelude.h"

#define QKV_ISA generic

// vec.h defines the vector types that all other headers use. The empty line keeps clang-format from
// sorting it behind them.
#include "isa/generic/vec.h"

#include "kernels/all.h"

namespace qkv {

const Implementation kGeneric = {"generic",
                                 [] { return true; },
                                 generic::kernels_of<float>(),
                                 generic::kernels_of<double>(),
                                 generic::kernels_of<BFloat16>(),
                                 generic::kernels_of<Float16>()};

}  // namespace qkv
