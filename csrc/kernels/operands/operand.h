// The operands of a product C = beta * C + A * B (gemm/tile_gemm.h), and the product itself.
//
// Passes multiply rows of query, key, value and grad_output, and tiles of their own making: the
// weights P and the gradients of scores dS. The classes of operands/ and what each product of
// attention takes from them:
//
//   product              A [rows x depth]                     B [depth x columns]
//   S^T   = K Q^T        KeyOperand::rows     [keys x D]      RowOperand::pack   [D x lanes]
//   dP^T  = V dO^T       KeyOperand::rows     [keys x Dv]     RowOperand::pack   [Dv x lanes]
//   O^T  += V^T P^T      KeyOperand::columns  [Dv x keys]     OutputSum::operand [keys x lanes]
//   dQ^T += K^T dS^T     KeyOperand::columns  [D x keys]      TileAsB::each      [keys x lanes]
//   dV   += P^T dO       TileAsA::each        [keys x rows]   RowOperand::rows   [rows x Dv]
//   dK   += dS^T Q       TileAsA::each        [keys x rows]   RowOperand::rows   [rows x D]
//
// O and dQ may be summed by rows instead, [rows x Dv] and [rows x D], from the same operands
// (multiply_by_rows): then only rows that there are are multiplied, and nothing is transposed.
//
// All of these classes have one interface and, where an instruction set multiplies pairs of bf16,
// a second body for BFloat16 (pair_operands.h, pair_tiles.h).
#pragma once

#include "kernels/gemm/gemm.h"
#include "kernels/operands/key_rows.h"

namespace qkv::QKV_ISA {

#ifdef QKV_PAIRS
constexpr bool kMultipliesPairs = true;
#else
constexpr bool kMultipliesPairs = false;
#endif

// Whether numbers of type E are multiplied as pairs of bf16. All others are multiplied as elements
// of the compute type.
template <class E>
constexpr bool kInPairs = kMultipliesPairs && std::is_same_v<E, BFloat16>;

// What an operand consists of.
template <class E>
using Factor = std::conditional_t<kInPairs<E>, Pair, Compute<E>>;

// What a row of an operand is copied to before it is transposed, or two rows make pairs.
template <class E>
using Natural = std::conditional_t<kInPairs<E>, BFloat16, Compute<E>>;

// Where the depth of a product is keys or rows, an operand may begin at multiples of this.
template <class E>
constexpr int64_t kDepthMultiple = kInPairs<E> ? 2 : 1;

// How many keys a product over `keys` keys multiplies. An odd one is paired with its neighbour,
// which is multiplied by 0.
constexpr int64_t touched_keys(int64_t keys, int64_t multiple) {
  return (keys + multiple - 1) / multiple * multiple;
}

// A.
template <class F>
struct LeftOperand {
  Matrix<F> a;
  int64_t rows, depth;
};

// B, rows of whole vectors, `row` elements apart. The product is multiplied by `factor`, which is 1
// but for pairs: an element is multiplied when it is packed.
template <class F>
struct RightOperand {
  const F* data;
  int64_t row;
  Compute<F> factor = 1;
};

// C, and what becomes of the numbers that are there. `ahead`, `before`: see MicroArgs.
template <class T>
struct Sum {
  T* data;
  int64_t row;
  Beta beta;
  Ahead* ahead = nullptr;
  const T* lanes = nullptr;
  int64_t before = 0;
};

// C [a.rows x columns] = beta * C + A * B.
template <class F, class T>
QKV_INLINE void multiply(const LeftOperand<F>& a, const RightOperand<F>& b, int64_t columns,
                         const Sum<T>& c) {
  gemm<F>(a.rows, columns,
          {a.depth, a.a.data, a.a.row, a.a.col, b.data, b.row, c.data, c.row, c.beta, c.lanes,
           b.factor, c.before, c.ahead});
}

// Whether rows of `input` can be B of multiply_by_rows.
template <class E>
bool multiplies_by_rows(const Input& input, int64_t dim) {
  return !kFixedBits && !kInPairs<E> && dim % kLanes<Compute<E>> == 0 && input.strides.col == 1;
}

// The same product, transposed: C [columns x a.rows] = beta * C + B^T A^T, of any number of
// columns. The columns of A are whole vectors (multiplies_by_rows), and beta is zero or one.
template <class F, class T>
QKV_INLINE void multiply_by_rows(const LeftOperand<F>& a, const RightOperand<F>& b, int64_t columns,
                                 T* to, Beta beta, Ahead* ahead = nullptr) {
  if constexpr (std::is_same_v<F, T>)
    multiply<T>({{b.data, 1, b.row}, columns, a.depth}, {a.a.data, a.a.col}, a.rows,
                Sum<T>{to, a.rows, beta, ahead});
}

}  // namespace qkv::QKV_ISA
