// Puts the parts of a row together after a forward pass that has split the keys.
#pragma once

#include "kernels/operands/operands.h"
#include "kernels/score/sinks.h"

namespace qkv::QKV_ISA {

// total [dim] = before + share * part; where `is_first`, before counts as 0.
template <class T>
void add_part(bool is_first, T share, const T* part, int64_t dim, T* total) {
  int64_t d = 0;
  for (; d + kLanes<T> <= dim; d += kLanes<T>) {
    const Vec<T> of_part = load(part + d) * share;
    store(total + d, is_first ? of_part : load(total + d) + of_part);
  }
  for (; d < dim; ++d) total[d] = (is_first ? 0 : total[d]) + share * part[d];
}

// Each part is weighted by its share of the softmax's denominator. A part whose split the row sees
// nothing of (its log-sum-exp is -inf) is left out, and a part with a NaN makes the row NaN.
template <class E>
void merge_parts(const Problem& p, const ForwardResult& result, const RowParts& of) {
  using T = Compute<E>;
  const T* const maxima = static_cast<const T*>(of.max) + of.row;
  const T* const lse = static_cast<const T*>(of.lse) + of.row;  // less these
  const int64_t dim = result.output.data ? p.head_dim_v : 0;
  T max = -kInfinity<T>;
  for (int64_t at = 0; at < of.splits * of.rows; at += of.rows)
    if (lse[at] != -kInfinity<T>) max = std::max(max, maxima[at]);
  T* const total = static_cast<T*>(of.output) + of.row * p.head_dim_v;  // of the first part
  T sum = 0;
  bool is_first = true;
  for (int64_t s = 0; s < of.splits; ++s) {
    const int64_t at = s * of.rows;
    if (lse[at] == -kInfinity<T>) continue;
    const T share = T(std::exp(double(maxima[at]) - double(max) + double(lse[at])));
    sum += share;
    add_part(is_first, share, total + at * p.head_dim_v, dim, total);
    is_first = false;
  }
  if (is_first) std::fill_n(total, dim, T(0));
  const double* const sink = sink_of_row(p, of.plane, of.row);
  if (sink && !(T(*sink) < kInfinity<T>))  // is in no part: see finish_sinks
    max = T(*sink), sum = is_first ? 1 : std::numeric_limits<T>::quiet_NaN();
  if (result.lse.data)
    *rows_of<T>(p, result.lse, of.plane)[of.row] = T(double(max) + std::log(double(sum)));
  const T divisor = sum == 0 ? 1 : sum;  // 0 where the row has nothing to attend to
  if (!dim) return;
  const Rows<E> output = rows_of<E>(p, result.output, of.plane);
  store_row(dim, output[of.row], output.col,
            [&](auto at) QKV_INLINE_LAMBDA { return at(total) / divisor; });
}

}  // namespace qkv::QKV_ISA
