// How the sums of the backward pass become gradients in the user's memory.
#pragma once

#include "kernels/operands/operands.h"

namespace qkv::QKV_ISA {

// factor * sum, of a number or of a vector of them. All NaN get the same bits: whether one comes
// from a product or from repair/ depends on what else an item has.
template <class V, class T>
QKV_INLINE V finished(V sum, T factor) {
  return sum == sum ? sum * factor : V{} + std::numeric_limits<T>::quiet_NaN();
}

// Rows begin, begin + 1, ... of `to` [dim] = factor * sums [rows, padded(dim)]. What the loop needs
// is passed by value: the compiler would load a member again after each store, which might have
// changed it.
template <class E, class T = Compute<E>>
QKV_INLINE void finish_dense(const T* sums, int64_t rows, Rows<E> to, int64_t begin, T factor,
                             int64_t dim) {
  const int64_t step = padded<T>(dim);
  for (int64_t r = 0; r < rows; ++r, sums += step)
    store_row(dim, to[begin + r], to.col,
              [=](auto at) QKV_INLINE_LAMBDA { return finished(at(sums), factor); });
}

template <class E>
void finish_rows(const Problem& p, const BackwardArgs& a, const Finished& of) {
  using T = Compute<E>;
  const Rows<E> grad_query = rows_of<E>(p, a.grad_query, of.plane);
  const Rows<T> sums{static_cast<T*>(of.sums.grad_query), p.group(), of.sums.query_head,
                     of.sums.query_row, 1};
  const int64_t step = of.part_bytes / int64_t(sizeof(T));
  for (int64_t block = of.begin / kGradRows; block * kGradRows < of.end; ++block) {
    const QuerySums* const its = of.sums.query_sums + block;
    if (*its == QuerySums::complete) continue;
    const int64_t end = std::min(of.end, (block + 1) * kGradRows);
    for (int64_t r = block * kGradRows; r < end; ++r) {
      T* const row = sums[r];
      store_row(p.head_dim, grad_query[r], grad_query.col, [&](auto at) QKV_INLINE_LAMBDA {
        decltype(at(row)) sum{};
        for (int64_t part = 0; part < of.parts; ++part)
          if (its[part * of.part_blocks] == QuerySums::begun) sum += at(row + part * step);
        return finished(sum, T(p.scale));
      });
    }
  }
}

// Keys [begin, end) of sums [S, padded(dim)].
template <class E, class T = Compute<E>>
void finish_sums(const Problem& p, const Finished& of, void* sums, T factor, int64_t dim,
                 const Output& to) {
  if (!to.data) return;
  const Rows<E> rows{key_plane<E>(p, to, of.plane), 1, 0, to.strides.row, to.strides.col};
  finish_dense<E>(static_cast<const T*>(sums) + of.begin * padded<T>(dim), of.end - of.begin, rows,
                  of.begin, factor, dim);
}

template <class E>
void finish_keys(const Problem& p, const BackwardArgs& a, const Finished& of) {
  using T = Compute<E>;
  finish_sums<E>(p, of, of.sums.grad_key, T(p.scale), p.head_dim, a.grad_key);
  finish_sums<E>(p, of, of.sums.grad_value, T(1), p.head_dim_v, a.grad_value);
  for (int m = 0; m < kMasks; ++m) {
    const Output& grad = a.grad_masks[m].keys;
    for (int64_t g = 0; grad.data && g < p.group(); ++g) {
      T* const to = element_at<T>(grad, key_column_offset(p, grad.strides, of.plane.batch,
                                                          of.plane.kv_head * p.group() + g));
      for (int64_t key = of.begin; key < of.end; ++key)
        to[key * grad.strides.col] =
            static_cast<const T*>(of.sums.mask_keys[m])[key * p.group() + g];
    }
  }
}

}  // namespace qkv::QKV_ISA
