// Features of an x86-64 CPU that Clang 14's __builtin_cpu_supports has no names for. It is for the
// caller to ask whether the operating system saves the registers that they need.
#pragma once

#include <cpuid.h>

namespace qkv {

inline bool cpu_has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx >> 29 & 1);
}

// Whether the CPU has both AMX's tiles and their products of bf16.
inline bool cpu_has_amx_bf16() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx >> 24 & 1) && (edx >> 22 & 1);
}

}  // namespace qkv
