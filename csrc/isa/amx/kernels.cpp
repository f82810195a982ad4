#include "kernels/prelude.h"

#if defined(__x86_64__)

#include <sys/syscall.h>
#include <unistd.h>

#include "dispatch/cpuid.h"

#define QKV_ISA amx
QKV_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")

#include "isa/amx/vec.h"
#include "kernels/entry.h"

QKV_TARGET_END

namespace qkv {
namespace {

// Asks Linux for the tile registers, which it gives to no process that has not asked.
bool permitted() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

}  // namespace

const Implementation kAmx = amx::of_pairs(
    "amx",
    [] {
      static const bool supported = kAvx512Bf16.supported() && cpu_has_amx_bf16() && permitted();
      return supported;
    },
    kAvx512);

}  // namespace qkv

#endif
