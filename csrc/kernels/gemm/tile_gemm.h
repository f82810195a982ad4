// The one micro-kernel behind all products of attention (docs/kernels.md):
//
//   C[M x N] = beta * C + A[M x K] * B[K x N]
//
// A has any strides and is read element by element, each broadcast to a vector. B and C are rows of
// whole vectors. The sum over K starts from zero and is added to beta * C at the end, and a long K
// is cut into chains, because the rounding error of a sum grows with the length of its longest
// chain of additions. An element E of A and B is a number of the compute type or a Pair (pairs.h);
// C has the compute type.
#pragma once

#include "kernels/simd/vec.h"

// The functions of this file take pairs, too, so those for vectors of pairs must come first: they
// are found by no other rule of the language, since a vector belongs to no namespace.
#ifdef QKV_PAIR_GEMM
#include "kernels/gemm/pairs.h"
#endif

namespace qkv::QKV_ISA {

enum class Beta { zero, one, lanes };  // lanes: each column of C has a factor of its own

// How A is laid out. A stride of 1, as in the first two, lets the compiler fold the index into the
// load instruction.
enum Access { kRowMajor, kColumnMajor, kAnyStrides, kAccessCount };

template <class E, class T = Compute<E>>
struct MicroArgs {
  int64_t depth;  // K
  const E* a;
  int64_t a_row, a_col;
  const E* b;
  int64_t b_row;
  T* c;
  int64_t c_row;
  Beta beta;
  const T* lanes;  // [N], Beta::lanes only
  T alpha = 1;     // Pair only: C = beta * C + alpha * A * B
  // From C to what beta multiplies, if that is not C itself.
  int64_t before = 0;
};

template <class T>
QKV_INLINE Vec<T> broadcast(const T* p) {
  return splat(*p);
}

template <class T>
QKV_INLINE Vec<T> add_product(Vec<T> a, Vec<T> b, Vec<T> sum, T) {
  return sum + a * b;
}

// Multiplies sums by alpha. (It is looked at once: after each store the compiler would read it
// again.)
template <int M, int NV, class T>
QKV_INLINE void scale_sums(T alpha, Vec<T> (&sum)[M][NV]) {
  if (alpha == 1) return;
  const Vec<T> factor = splat(alpha);
  QKV_UNROLL
  for (int i = 0; i < M; ++i) {
    QKV_UNROLL
    for (int v = 0; v < NV; ++v) sum[i][v] *= factor;
  }
}

// C [M x NV vectors] = beta * C + sum; C begins at c.
template <class E, Beta beta, int M, int NV, class T>
QKV_INLINE void store_sums(const MicroArgs<E>& args, Vec<T> (&sum)[M][NV], T* c) {
  constexpr int W = kLanes<T>;
  const int64_t c_row = args.c_row;
  const T* before = c + args.before;
  Vec<T> lanes[NV];
  if constexpr (beta == Beta::lanes) {
    QKV_UNROLL
    for (int v = 0; v < NV; ++v) lanes[v] = load(args.lanes + v * W);
  }
  QKV_UNROLL
  for (int i = 0; i < M; ++i, c += c_row, before += c_row) {
    QKV_UNROLL
    for (int v = 0; v < NV; ++v) {
      if constexpr (beta == Beta::one) {
        Vec<T> summed = load(before + v * W);
        sum[i][v] += summed;
        // The sum of two NaN is the first, on every instruction set, or the signs of NaN would
        // depend on how keys are split. Where an addition overwrites its first operand, this keeps
        // the compiler from taking the second for it.
        if constexpr (!kHasFma)
          asm("" : QKV_VECTOR_REGISTER(sum[i][v]), QKV_VECTOR_REGISTER(summed));
      }
      if (beta == Beta::lanes) sum[i][v] += lanes[v] * load(before + v * W);
      store(c + v * W, sum[i][v]);
    }
  }
}

// Computes M * tiles rows of C, NV vectors wide: `tiles` times M rows, whose sums are in registers.
template <class E, Access access, int M, int NV>
void micro_kernel(const MicroArgs<E>& args, int64_t tiles) {
  using T = Compute<E>;
  constexpr int W = kLanes<T>;
  const int64_t a_row = access == kColumnMajor ? 1 : args.a_row;
  const int64_t a_col = access == kRowMajor ? 1 : args.a_col;
  const int64_t b_row = args.b_row, c_row = args.c_row, depth = args.depth;
  const E* first = args.a;
  T* c = args.c;
  for (; tiles > 0; --tiles, first += M * a_row, c += M * c_row) {
    const E* a[M];
    QKV_UNROLL
    for (int i = 0; i < M; ++i) a[i] = first + i * a_row;
    const E* b = args.b;
    Vec<T> sum[M][NV];
    QKV_UNROLL
    for (int i = 0; i < M; ++i)
      for (int v = 0; v < NV; ++v) sum[i][v] = Vec<T>{};

    for (int64_t k = 0; k < depth; ++k) {
      Vec<E> bv[NV];
      QKV_UNROLL
      for (int v = 0; v < NV; ++v) bv[v] = load(b + v * W);
      QKV_UNROLL
      for (int i = 0; i < M; ++i) {
        const Vec<E> av = broadcast(a[i] + k * a_col);
        QKV_UNROLL
        for (int v = 0; v < NV; ++v) sum[i][v] = add_product(av, bv[v], sum[i][v], E{});
      }
      b += b_row;
    }

    if constexpr (std::is_same_v<E, Pair>) scale_sums(args.alpha, sum);
    switch (args.beta) {  // here, and not once for each vector
      case Beta::zero:
        store_sums<E, Beta::zero>(args, sum, c);
        break;
      case Beta::one:
        store_sums<E, Beta::one>(args, sum, c);
        break;
      case Beta::lanes:
        store_sums<E, Beta::lanes>(args, sum, c);
        break;
    }
  }
}

template <class E>
using MicroKernel = void (*)(const MicroArgs<E>&, int64_t tiles);

template <class E, Access access, int NV, int... M>
constexpr auto micro_kernels(std::integer_sequence<int, M...>) {
  return std::array<MicroKernel<E>, sizeof...(M)>{micro_kernel<E, access, M + 1, NV>...};
}

// kMicroKernels[rows - 1] computes so many rows at a time.
template <class E, Access access, int NV>
constexpr auto kMicroKernels =
    micro_kernels<E, access, NV>(std::make_integer_sequence<int, kMaxRows[NV - 1]>());

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

// Computes all rows of C for one or two vectors of columns. The rows are cut into tiles of equal
// height, and some of one row less: that is faster than full tiles and a low one for the remainder.
// Overwrites args.a and args.c.
template <class E, Access access, int NV>
QKV_INLINE void gemm_panel(int64_t rows, MicroArgs<E>& args) {
  if (rows == 0) return;
  const int64_t tiles = (rows + kMaxRows[NV - 1] - 1) / kMaxRows[NV - 1];
  const int64_t low = rows / tiles, high_tiles = rows % tiles;
  if (high_tiles > 0) {
    gemm_tiles(kMicroKernels<E, access, NV>[low], args, high_tiles);
    args.a += high_tiles * (low + 1) * args.a_row;
    args.c += high_tiles * (low + 1) * args.c_row;
  }
  gemm_tiles(kMicroKernels<E, access, NV>[low - 1], args, tiles - high_tiles);
}

template <class E, Access access>
void gemm_access(int64_t rows, int64_t columns, const MicroArgs<E>& product) {
  constexpr int W = kLanes<E>;
  MicroArgs<E> args = product;
  for (int64_t at = 0; at < columns;) {
    const bool is_wide = columns - at >= 2 * W;
    is_wide ? gemm_panel<E, access, 2>(rows, args) : gemm_panel<E, access, 1>(rows, args);
    const int step = is_wide ? 2 * W : W;
    at += step;
    args.a = product.a;
    args.b += step;
    args.c = product.c + at;
    if (args.lanes) args.lanes += step;
  }
}

// The product above for C [rows x columns]; `columns` is a multiple of kLanes<E>.
template <class E>
void gemm(int64_t rows, int64_t columns, const MicroArgs<E>& args) {
  if (args.a_col == 1) return gemm_access<E, kRowMajor>(rows, columns, args);
  if (args.a_row == 1) return gemm_access<E, kColumnMajor>(rows, columns, args);
  gemm_access<E, kAnyStrides>(rows, columns, args);
}

}  // namespace qkv::QKV_ISA
