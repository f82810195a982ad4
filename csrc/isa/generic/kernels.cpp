#include "isa/generic/vec.h"
#include "kernels/entry.h"

namespace qkv {

const Implementation kGeneric = generic::complete("generic", [] { return true; });

}  // namespace qkv
