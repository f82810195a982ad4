// Takes the place of avx512, avx512bf16 and amx in a build with QKV_AVX512=OFF
// (cmake/kernels.cmake), which has no kernels for them: it says that no CPU can run them.
#include "dispatch/kernel_table.h"

#if defined(__x86_64__)

namespace qkv {
namespace {

bool never() { return false; }

}  // namespace

const Implementation kAvx512 = {"avx512", never, {}, {}, {}, {}};
const Implementation kAvx512Bf16 = {"avx512bf16", never, {}, {}, {}, {}};
const Implementation kAmx = {"amx", never, {}, {}, {}, {}};

}  // namespace qkv

#endif
