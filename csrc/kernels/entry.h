// The table of one instruction set.
#pragma once

#include "kernels/contract.h"
#include "kernels/gemm/peak.h"
#include "kernels/passes/backward.h"
#include "kernels/passes/finish_grad.h"
#include "kernels/passes/forward.h"
#include "kernels/passes/hard.h"
#include "kernels/passes/jvp.h"
#include "kernels/passes/merge_parts.h"
#include "kernels/passes/rotate.h"
#include "kernels/passes/row_product.h"
#include "kernels/passes/row_sums.h"
#include "kernels/simd/exp_of.h"

namespace qkv::QKV_ISA {

template <class E, class T = Compute<E>>
constexpr PeakLoop peak_of() {
  constexpr int kTileFlops = 4 * 16 * 16 * 16 * 4;  // of four products of two tiles
  constexpr int kVectorFlops = kPeakChains * kLanes<T> * (kInPairs<E> ? 4 : 2);
  constexpr bool kIsTile = kTiles && kInPairs<E>;
  return {kIsTile       ? "tdpbf16ps"
          : kInPairs<E> ? "vdpbf16ps"
                        : "FMA",
          kIsTile ? kTileFlops : kVectorFlops, peak_loop<Factor<E>>};
}

template <class E>
constexpr Kernels kernels_of() {
  using T = Compute<E>;
  Kernels kernels{
      kTileRows<T>,   key_step,       forward<E>,  merge_parts<E>, backward<E>,
      finish_rows<E>, finish_keys<E>, row_sums<E>, hard<E>,        nullptr,
      rotate<E>,      nullptr,        kLanes<T>,   kInPairs<E>,    kTiles && kInPairs<E>,
      kFixedBits,     exp_of_number,  peak_of<E>()};
  if constexpr (!kInPairs<E>) kernels.jvp = jvp<E>;
  if constexpr (!kFixedBits) kernels.row_product = row_product<E>;
  return kernels;
}

// These two are templates so that only kernels that are used are compiled.

// An instruction set that has kernels of its own for every dtype.
template <class = void>
constexpr Implementation complete(const char* name, const Implementation* fixed_bits,
                                  bool (*supported)()) {
  return {
      name,
      supported,
      {kernels_of<float>(), kernels_of<double>(), kernels_of<BFloat16>(), kernels_of<Float16>()},
      nullptr,
      fixed_bits};
}
// One that multiplies pairs of bf16, and leaves all other dtypes to `others`.
template <class = void>
constexpr Implementation of_pairs(const char* name, bool (*supported)(),
                                  const Implementation& others) {
  return {name, supported, {Kernels{}, Kernels{}, kernels_of<BFloat16>(), Kernels{}}, &others};
}

}  // namespace qkv::QKV_ISA
