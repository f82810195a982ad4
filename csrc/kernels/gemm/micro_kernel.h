// The micro-kernel of tile_gemm.h: the sums of some rows of C, half a vector, one or two vectors
// wide, in registers.
#pragma once

#include "kernels/gemm/rows_ahead.h"
#include "kernels/simd/vec.h"

// The functions of this file take pairs, too, so those for vectors of pairs must come first: they
// are found by no other rule of the language, since a vector belongs to no namespace.
#ifdef QKV_PAIRS
#include "kernels/gemm/pairs.h"
#endif

namespace qkv::QKV_ISA {

enum class Beta { zero, one, lanes };  // lanes: each column of C has a factor of its own

// How A is laid out: the elements of a row follow each other, or those of a column. A stride of 1
// lets the compiler fold the index into the load instruction.
enum Access { kRowMajor, kColumnMajor };

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
  Ahead* ahead = nullptr;  // asked before the sums of some rows of C
};

// In place of a number of vectors: half a vector.
constexpr int kHalf = 0;
template <class T, int NV>
using PanelVec = typename std::conditional_t<NV == kHalf, HalfTraits<T>, VecTraits<T>>::Vec;

template <class V, class T>
QKV_INLINE V load_as(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// Writes a vector, or half of one and zeros behind it, so that what works on the whole vector later
// finds numbers.
template <class V, class T>
QKV_INLINE void store_sum(T* p, V v) {
  std::memcpy(p, &v, sizeof v);
  const V zeros{};
  if constexpr (sizeof v < kVectorBytes) std::memcpy(p + kLanes<T> / 2, &zeros, sizeof zeros);
}

template <class V, class T>
QKV_INLINE V broadcast(const T* p) {
  return *p - V{};  // as in splat
}

template <class V, class T>
QKV_INLINE V add_product(V a, V b, V sum, T) {
  return multiply_add<T>(a, b, sum);
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
template <class E, Beta beta, int M, int NV, class V, class T>
QKV_INLINE void store_sums(const MicroArgs<E>& args, V (&sum)[M][NV], T* c) {
  constexpr int W = kLanes<T>;
  const int64_t c_row = args.c_row;
  const T* before = c + args.before;
  V lanes[NV];
  if constexpr (beta == Beta::lanes) {
    QKV_UNROLL
    for (int v = 0; v < NV; ++v) lanes[v] = load_as<V>(args.lanes + v * W);
  }
  QKV_UNROLL
  for (int i = 0; i < M; ++i, c += c_row, before += c_row) {
    QKV_UNROLL
    for (int v = 0; v < NV; ++v) {
      if constexpr (beta == Beta::one) {
        V summed = load_as<V>(before + v * W);
        sum[i][v] += summed;
        // The sum of two NaN is the first, on every instruction set, or the signs of NaN would
        // depend on how keys are split. Where an addition overwrites its first operand, this keeps
        // the compiler from taking the second for it.
        if constexpr (!kHasFma)
          asm("" : QKV_VECTOR_REGISTER(sum[i][v]), QKV_VECTOR_REGISTER(summed));
      }
      if (beta == Beta::lanes)
        sum[i][v] = multiply_add<T>(lanes[v], load_as<V>(before + v * W), sum[i][v]);
      store_sum(c + v * W, sum[i][v]);
    }
  }
}

// Computes M * tiles rows of C, NV vectors wide, or half a vector (kHalf): `tiles` times M rows,
// whose sums are in registers.
template <class E, Access access, int M, int NV>
void micro_kernel(const MicroArgs<E>& args, int64_t tiles) {
  using T = Compute<E>;
  using V = PanelVec<T, NV>;
  constexpr int W = kLanes<T>, N = std::max(1, NV);
  const int64_t a_row = access == kColumnMajor ? 1 : args.a_row;
  const int64_t a_col = access == kRowMajor ? 1 : args.a_col;
  const int64_t b_row = args.b_row, c_row = args.c_row, depth = args.depth;
  const E* first = args.a;
  T* c = args.c;
  for (; tiles > 0; --tiles, first += M * a_row, c += M * c_row) {
    if (args.ahead) args.ahead->ask();
    const E* a[M];
    QKV_UNROLL
    for (int i = 0; i < M; ++i) a[i] = first + i * a_row;
    const E* b = args.b;
    V sum[M][N];
    QKV_UNROLL
    for (int i = 0; i < M; ++i)
      for (int v = 0; v < N; ++v) sum[i][v] = V{};

    for (int64_t k = 0; k < depth; ++k) {
      PanelVec<E, NV> bv[N];
      QKV_UNROLL
      for (int v = 0; v < N; ++v) bv[v] = load_as<PanelVec<E, NV>>(b + v * W);
      QKV_UNROLL
      for (int i = 0; i < M; ++i) {
        const auto av = broadcast<PanelVec<E, NV>>(a[i] + k * a_col);
        QKV_UNROLL
        for (int v = 0; v < N; ++v) sum[i][v] = add_product(av, bv[v], sum[i][v], E{});
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

}  // namespace qkv::QKV_ISA
