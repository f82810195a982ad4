// The one micro-kernel behind all products of attention (docs/kernels.md):
//
//   C[M x N] = beta * C + A[M x K] * B[K x N]
//
// A has a stride of 1 along its rows or its columns, and any other one, and is read element by
// element, each broadcast to a vector. B and C are rows of whole vectors. The sum over K starts
// from zero and is added to beta * C at the end, and a long K is cut into chains, because the
// rounding error of a sum grows with the length of its longest chain of additions. An element E of
// A and B is a number of the compute type or a Pair (pairs.h); C has the compute type.
#pragma once

#include "kernels/gemm/micro_kernel.h"

namespace qkv::QKV_ISA {

template <class E>
using MicroKernel = void (*)(const MicroArgs<E>&, int64_t tiles);

template <class E, Access access, int NV, int... M>
constexpr auto micro_kernels(std::integer_sequence<int, M...>) {
  return std::array<MicroKernel<E>, sizeof...(M)>{micro_kernel<E, access, M + 1, NV>...};
}

// The most rows of a micro-kernel.
template <int NV>
constexpr int kPanelRows = kMaxRows[NV == kHalf ? 0 : NV - 1];
// kMicroKernels[rows - 1] computes so many rows at a time.
template <class E, Access access, int NV>
constexpr auto kMicroKernels =
    micro_kernels<E, access, NV>(std::make_integer_sequence<int, kPanelRows<NV>>());

// The longest chain of additions. Sums over a head_dim up to this, and over the keys of a tile, are
// one chain.
constexpr int64_t kLongestChain = 126;

// Computes `tiles` tiles of the same height; a depth of more than kLongestChain is cut into equal
// chains.
template <class E>
void gemm_tiles(MicroKernel<E> kernel, MicroArgs<E>& args, int64_t tiles) {
  if (args.depth <= kLongestChain) return kernel(args, tiles);
  MicroArgs<E> chain = args;
  int64_t depth = args.depth;
  for (int64_t chains = (depth + kLongestChain - 1) / kLongestChain; chains > 0; --chains) {
    chain.depth = (depth + chains - 1) / chains;
    kernel(chain, tiles);
    chain.a += chain.depth * chain.a_col;
    chain.b += chain.depth * chain.b_row;
    chain.beta = Beta::one;
    chain.before = 0;
    depth -= chain.depth;
  }
}

// Computes all rows of C for one or two vectors of columns, or half a vector. The rows are cut into
// tiles of equal height, and some of one row less: that is faster than full tiles and a low one for
// the remainder. Overwrites args.a and args.c.
template <class E, Access access, int NV>
QKV_INLINE void gemm_panel(int64_t rows, MicroArgs<E>& args) {
  if (rows == 0) return;
  const int64_t tiles = (rows + kPanelRows<NV> - 1) / kPanelRows<NV>;
  const int64_t low = rows / tiles, high_tiles = rows % tiles;
  if (high_tiles > 0) {
    gemm_tiles(kMicroKernels<E, access, NV>[low], args, high_tiles);
    args.a += high_tiles * (low + 1) * args.a_row;
    args.c += high_tiles * (low + 1) * args.c_row;
  }
  gemm_tiles(kMicroKernels<E, access, NV>[low - 1], args, tiles - high_tiles);
}

template <class E>
constexpr bool kTakesHalves = kHasHalves && std::is_same_v<E, Compute<E>>;

// How many columns a product computes to have the first `count`, where C has room for whole
// vectors: whole vectors, or, where that does and is faster, half of the last one, whose other
// lanes become 0.
template <class E>
QKV_INLINE int64_t whole_columns(int64_t count) {
  const int64_t step = kTakesHalves<E> && QKV_SPLITS_VECTORS ? kLanes<E> / 2 : kLanes<E>;
  return (count + step - 1) & -step;
}

template <class E, Access access>
void gemm_access(int64_t rows, int64_t columns, MicroArgs<E>& args) {
  constexpr int W = kLanes<E>;
  const E* const a = args.a;
  auto* const c = args.c;
  for (int64_t at = 0; at < columns;) {
    const int64_t left = columns - at;
    const int step = left >= 2 * W ? 2 * W : left >= W ? W : W / 2;
    if (step == 2 * W)
      gemm_panel<E, access, 2>(rows, args);
    else if (step == W)
      gemm_panel<E, access, 1>(rows, args);
    else if constexpr (kTakesHalves<E>)
      gemm_panel<E, access, kHalf>(rows, args);
    at += step;
    args.a = a;
    args.b += step;
    args.c = c + at;
    if (args.lanes) args.lanes += step;
  }
}

// The product above for C [rows x columns]; `columns` is a multiple of kLanes<E>, or of half of it
// if kTakesHalves<E>, and a_row or a_col is 1. Overwrites args: a copy of them would read as whole
// vectors what has just been written number by number, and a core waits until that is in its cache.
template <class E>
void gemm(int64_t rows, int64_t columns, MicroArgs<E>&& args) {
  if (args.a_col == 1) return gemm_access<E, kRowMajor>(rows, columns, args);
  gemm_access<E, kColumnMajor>(rows, columns, args);
}

}  // namespace qkv::QKV_ISA
