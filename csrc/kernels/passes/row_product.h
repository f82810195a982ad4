// An item of a product of few rows with a matrix (row_product.h).
#pragma once

#include "kernels/products/row_dots.h"
#include "kernels/products/row_sums.h"
#include "row_product.h"

namespace qkv::QKV_ISA {

// The output of an item = sums [rows, whole_units(columns)] + bias.
template <class E, class T = Compute<E>>
void write_rows(const RowProduct& p, const RowProductItem& item, const T* sums, T* biases) {
  const Strides &out = p.output.strides, &bias = p.bias.strides;
  const int64_t columns = item.end - item.begin;
  std::fill_n(biases, columns, T(0));
  if (p.bias.data)
    for (int64_t n = 0; n < columns; ++n)
      biases[n] = widen(static_cast<const E*>(p.bias.data)[(item.begin + n) * bias.col]);
  E* const to = static_cast<E*>(p.output.data) + item.batch * out.head + item.begin * out.col;
  for (int64_t m = 0; m < p.rows; ++m)
    store_row<E>(columns, to + m * out.row, out.col, [&](const auto& at) QKV_INLINE_LAMBDA {
      return at(sums + m * whole_units<E>(columns)) + at(biases);
    });
}

template <class E>
size_t row_product(const RowProduct& p, const RowProductItem& item, void* workspace) {
  using T = Compute<E>;
  Arena arena(workspace);
  T* const sums = arena.take<T>(p.rows * kProductColumns);
  T* const biases = arena.take<T>(kProductColumns);
  const auto run = [&](auto product, int64_t step) {
    if (arena.counting()) return;
    const auto of = [&](const auto& tensor) {
      return static_cast<const E*>(tensor.data) + item.batch * tensor.strides.head;
    };
    product.pack({of(p.input), 1, 0, p.input.strides.row, p.input.strides.col});
    product.run(of(p.matrix) + item.begin * p.matrix.strides.row, step, item.end - item.begin,
                sums);
    write_rows<E>(p, item, sums, biases);
  };
  if (along_depth(p))
    run(RowDots<E>(p.rows, p.depth, arena), p.matrix.strides.row);
  else
    run(RowSums<E>(p.rows, p.depth, arena), p.matrix.strides.col);
  return arena.used();
}

}  // namespace qkv::QKV_ISA
