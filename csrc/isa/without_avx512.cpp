// Takes the place of avx512, avx512bf16 and amx in a build with QKV_AVX512=OFF
// (cmake/kernels.cmake), which has no kernels for them: it says that no CPU can run them.
#include "dispatch/kernel_table.h"

#if defined(__x86_64__)

namespace qkv {

const Implementation kAvx512 = {"avx512", [] { return false; }, {}};
const Implementation kAvx512Bf16 = {"avx512bf16", kAvx512.supported, {}};
const Implementation kAmx = {"amx", kAvx512.supported, {}};

}  // namespace qkv

#endif
