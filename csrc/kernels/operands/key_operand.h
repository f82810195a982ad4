// Keys or values of one plane as operand A, in both directions.
#pragma once

#include "kernels/operands/key_rows.h"
#include "kernels/operands/operand.h"
#include "kernels/operands/rows.h"

namespace qkv::QKV_ISA {

// Which directions are needed. Pairs have a copy for each.
enum class Use { rows, columns, both };

template <class E>
class KeyOperand {
  using T = Compute<E>;

 public:
  // For up to `keys` keys at a time. copies: whether KeyRows::read may copy them (copies_rows).
  KeyOperand(Arena& arena, bool copies, int64_t keys, int64_t dim, Use)
      : dim_(dim), copy_(copies ? arena.take<T>(keys * padded<T>(dim)) : nullptr) {}

  // Reads keys [key, key + keys), to which the other functions refer.
  void load(const KeyRows<E>& rows, int64_t key, int64_t keys) {
    first_ = key;
    matrix_ = rows.read(key, keys, copy_);
  }

  // The same of keys that `wider` has read, whose first numbers these are.
  void load(const KeyOperand& wider, int64_t key, int64_t) {
    first_ = key;
    matrix_ = wider.matrix_;
  }

  // The rows of keys [key, key + keys), as they lie: [keys x dim].
  LeftOperand<T> rows(int64_t key, int64_t keys) const {
    return {matrix_.from(key - first_), keys, dim_};
  }
  // The transposed matrix [dim x keys] of the same keys. `key` is a multiple of kDepthMultiple<E>
  // after the first.
  LeftOperand<T> columns(int64_t key, int64_t keys) const {
    const Matrix<T> m = matrix_.from(key - first_);
    return {{m.data, m.col, m.row}, dim_, keys};
  }
  // The numbers [keys, dim], for whoever looks at them.
  Matrix<Natural<E>> natural() const { return matrix_; }

 private:
  int64_t dim_;
  T* copy_;
  int64_t first_ = 0;
  Matrix<T> matrix_{};
};

}  // namespace qkv::QKV_ISA
