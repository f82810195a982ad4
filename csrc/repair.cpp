#include "repair.h"

#include <cmath>
#include <limits>

#include "reference/reference.h"
#include "strides.h"

namespace qkv {
namespace {

// Whether query row (h, i) of the backward pass has a finite log-sum-exp and
// gradient: if not, every gradient it contributes to is NaN by right.
template <class T>
bool row_is_finite(const Problem& p, const BackwardArgs& a, int64_t b, int64_t h, int64_t i) {
  T sum = plane<T>(p, a.lse, b, h)[i * a.lse.strides.row];
  if (sum == -std::numeric_limits<T>::infinity()) return true;  // it sees nothing
  if (a.grad_lse.data) sum += plane<T>(p, a.grad_lse, b, h)[i * a.grad_lse.strides.row];
  if (a.grad_output.data) {
    const Strides& s = a.grad_output.strides;
    const T* row = plane<T>(p, a.grad_output, b, h) + i * s.row;
    for (int64_t d = 0; d < p.head_dim_v; ++d) sum += row[d * s.col] * 0;
  }
  return std::isfinite(sum);
}

bool row_is_finite(const Problem& p, const BackwardArgs& a, int64_t b, int64_t h, int64_t i) {
  return p.dtype == DType::f32 ? row_is_finite<float>(p, a, b, h, i)
                               : row_is_finite<double>(p, a, b, h, i);
}

}  // namespace

void repair_output(const Problem& p, const ForwardResult& result, int64_t batch, int64_t kv_head,
                   int64_t row, double sum) {
  if (std::isnan(sum)) return;  // a NaN score makes every output NaN
  const int64_t group = p.group();
  reference::output_row(p, result, batch, kv_head * group + row % group, row / group);
}

void repair_grad_query(const Problem& p, const BackwardArgs& args, int64_t batch, int64_t kv_head,
                       int64_t row) {
  const int64_t group = p.group(), head = kv_head * group + row % group, query = row / group;
  if (row_is_finite(p, args, batch, head, query))
    reference::grad_query_row(p, args, batch, head, query);
}

void repair_grad_key_value(const Problem& p, const BackwardArgs& args, int64_t batch,
                           int64_t kv_head, int64_t key) {
  const int64_t group = p.group();
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
    for (int64_t query = 0; query < p.seqlen_q; ++query)
      if (reference::attends(p, batch, head, query, key) &&
          !row_is_finite(p, args, batch, head, query))
        return;
  reference::grad_key_value_row(p, args, batch, kv_head, key);
}

}  // namespace qkv
