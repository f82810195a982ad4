#include "kernels/prelude.h"

#define QKV_ISA QKV_KERNELS(generic)

#include "isa/generic/vec.h"
#include "kernels/entry.h"

namespace qkv {

const Implementation QKV_KERNELS(kGeneric) = QKV_ISA::complete("generic",
                                                               QKV_FIXED_BITS_OF(kGeneric),
                                                               [] { return true; });

}  // namespace qkv
