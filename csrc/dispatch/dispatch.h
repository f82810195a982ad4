// Which instruction set's kernels run, and how they multiply half precision.
#pragma once

#include <vector>

#include "common/tensor.h"
#include "export.h"

namespace qkv {

struct Implementation;  // dispatch/kernel_table.h

// The instruction sets that this CPU can run, best first: "amx", "avx512bf16", "avx512", "avx2",
// "neon", "generic". "avx512bf16" comes after "avx512" on Intel's CPUs
// (dispatch/dispatch.cpp).
QKV_CORE_API std::vector<const char*> supported_isas();
std::vector<const Implementation*> supported_implementations();

// The instruction set in use is the best one, or that which set_isa() or the environment variable
// QKV_ISA asked for. Both functions throw std::invalid_argument for a name that is unknown or that
// this CPU cannot run.
QKV_CORE_API const char* active_isa();
QKV_CORE_API void set_isa(const char* name);

// What the factors of a product are when query, key and value are in half precision. "native":
// their own type where the instruction set in use multiplies it, which is bf16 with avx512bf16 and
// amx; weights and gradients of scores are rounded to it as factors. "float32": every factor is
// widened, and nothing but results is rounded. The setting is the one that the environment variable
// QKV_HALF_PRODUCTS or set_half_products() asked for, else "native". Both functions throw
// std::invalid_argument for any other name. Each has its own order of summation, and so its own
// last digits of a score: a backward pass under another setting than its forward pass has to say so
// (ScoreWay in problem.h), as autograd does.
QKV_CORE_API const char* half_products();
QKV_CORE_API void set_half_products(const char* name);
// Whether passes whose Problem::score_way is automatic, and rotations, have the same bits on every
// CPU (kernels/fixed_bits.h). The setting is the one that set_reproducible() asked for, else that
// of the environment variable QKV_REPRODUCIBLE, 1 or 0, else no. reproducible() throws
// std::invalid_argument if the variable is anything else.
QKV_CORE_API bool reproducible();
QKV_CORE_API void set_reproducible(bool yes);
// Whether tiles of scores of query and key of this type are made by pairs, with the instruction set
// and the setting in use.
QKV_CORE_API bool multiplies_pairs(DType dtype);

}  // namespace qkv
