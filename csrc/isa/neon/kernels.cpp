#if defined(__aarch64__)

#include "isa/neon/vec.h"
#include "kernels/entry.h"

namespace qkv {

const Implementation kNeon = neon::complete("neon", [] { return true; });

}  // namespace qkv

#endif
