#include "kernels/prelude.h"

#define QKV_ISA generic

#include "isa/generic/vec.h"
#include "kernels/entry.h"

namespace qkv {

const Implementation kGeneric = {"generic",
                                 [] { return true; },
                                 generic::kernels_of<float>(),
                                 generic::kernels_of<double>(),
                                 generic::kernels_of<BFloat16>(),
                                 generic::kernels_of<Float16>()};

}  // namespace qkv
