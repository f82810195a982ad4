// Included by every isa/<name>/kernels.cpp before its target region opens.
//
// Everything from the standard library comes in here: a std:: template first
// instantiated inside the region would be compiled for the wider instruction
// set, and the linker might pick that copy for the whole program.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <optional>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "attention.h"
#include "common/half.h"
#include "common/mask_map.h"
#include "common/philox.h"
#include "common/strides.h"
#include "common/visible.h"
#include "common/workspace.h"
#include "dispatch/kernel_table.h"
#include "program/compiled.h"

// An instruction set's kernels are compiled twice: isa/<name>/fixed_bits.cpp is
// isa/<name>/kernels.cpp once more, with this macro, as the kernels of kernels/fixed_bits.h.
// QKV_KERNELS(x) is the name that x has in the compilation at hand, and QKV_FIXED_BITS_OF(x) a
// pointer to the Implementation of the second one, in the first.
#ifdef QKV_FIXED_BITS
#define QKV_KERNELS(name) name##FixedBits
#define QKV_FIXED_BITS_OF(name) nullptr
#else
#define QKV_KERNELS(name) name
#define QKV_FIXED_BITS_OF(name) &name##FixedBits
#endif

#define QKV_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define QKV_TARGET_BEGIN(features) \
  QKV_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define QKV_TARGET_END QKV_PRAGMA(clang attribute pop)
#else
#define QKV_TARGET_BEGIN(features) \
  QKV_PRAGMA(GCC push_options)     \
  QKV_PRAGMA(GCC target(features))
#define QKV_TARGET_END QKV_PRAGMA(GCC pop_options)
#endif

// Accumulators live in arrays of vectors; only a complete unroll keeps them in
// registers at -O2 (without: half the speed).
#if defined(__clang__)
#define QKV_UNROLL _Pragma("clang loop unroll(full)")
#else
#define QKV_UNROLL _Pragma("GCC unroll 32")
#endif

#define QKV_INLINE inline __attribute__((always_inline))
// After the parameters of a lambda. GCC takes a function that does nothing but prefetch for one
// without effects, and leaves out calls of it.
#define QKV_INLINE_LAMBDA __attribute__((always_inline))

// A vector register, for asm.
#if defined(__x86_64__)
#define QKV_VECTOR_REGISTER "+v"
#else
#define QKV_VECTOR_REGISTER "+w"
#endif
