// How the sums of the backward pass become gradients in the user's memory.
#pragma once

#include "kernels/operands/rows.h"
#include "kernels/passes/grad_rows.h"

namespace qkv::QKV_ISA {

template <class E>
void finish_grad_key_value(const Problem& p, const BackwardArgs& a, const BackwardItem& item,
                           const BackwardScratch<E>& s) {
  using T = Compute<E>;
  const int64_t dim = padded<T>(p.head_dim), dim_v = padded<T>(p.head_dim_v);
  E* grad_key = plane<E>(p, a.grad_key, item.batch, item.kv_head);
  E* grad_value = plane<E>(p, a.grad_value, item.batch, item.kv_head);
  const Strides& k = a.grad_key.strides;
  const Strides& v = a.grad_value.strides;
  for (int64_t j = 0; j < item.key_end - item.key_begin; ++j) {
    const int64_t key = item.key_begin + j;
    T* from_key = s.grad_key + j * dim;
    T* from_value = s.grad_value + j * dim_v;
    for (int64_t d = 0; d < dim; d += kLanes<T>)
      store(from_key + d, load(from_key + d) * T(p.scale));
    if (grad_key) scatter_row(from_key, false, p.head_dim, grad_key + key * k.row, k.col);
    if (grad_value) scatter_row(from_value, false, p.head_dim_v, grad_value + key * v.row, v.col);
  }
}

template <class E, class T = Compute<E>>
void finish_grad_mask_keys(const Problem& p, const Output& grad, const BackwardItem& item,
                           const T* sums) {
  for (int64_t key = item.key_begin; key < item.key_end; ++key)
    for (int64_t g = 0; g < p.group(); ++g, sums += kLanes<T>)
      plane<T>(p, grad, item.batch, item.kv_head * p.group() + g)[key * grad.strides.col] = *sums;
}

// Adds the parts of row r that the splits after the first have left to `sum`.
template <class T>
void add_parts(const Problem& p, const GradQueryItem& item, int64_t r, T* sum, int64_t col) {
  const T* partial = static_cast<const T*>(item.partial_grad_query);
  const int64_t total = p.group() * p.seqlen_q;
  for (int64_t part = 0; part < item.parts; ++part)
    if (r >= grad_row_begin(p, (part + 1) * item.split_keys) &&
        r < grad_row_end(p, std::min(p.seqlen_k, (part + 2) * item.split_keys)))
      scatter_row(partial + (part * total + r) * p.head_dim, true, p.head_dim, sum, col);
}

template <class E>
void finish_grad_query(const Problem& p, const BackwardArgs& a, const GradQueryItem& item) {
  using T = Compute<E>;
  const Rows<E> grad_query = rows_of<E>(p, a.grad_query, item.batch, item.kv_head);
  for (int64_t r = item.row_begin; r < item.row_end; ++r) {
    if (item.sums) {
      T* sum = static_cast<T*>(item.sums) + r * p.head_dim;
      add_parts(p, item, r, sum, 1);
      scatter_row(sum, false, p.head_dim, grad_query[r], grad_query.col);
    } else if constexpr (!kIsHalf<E>) {  // halves without sums have one split, and no parts
      add_parts(p, item, r, grad_query[r], grad_query.col);
    }
  }
}

}  // namespace qkv::QKV_ISA
