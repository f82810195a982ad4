#include "repair.h"

#include <cmath>

#include "half.h"
#include "reference/reference.h"
#include "strides.h"

namespace qkv {
namespace {

// Row `row` (query row for query-side tensors, key row for key-side ones) of T.
template <class T, class Tensor>
auto* row_of(const Problem& p, const Tensor& t, int64_t batch, int64_t head, int64_t row) {
  return plane<T>(p, t, batch, head) + row * t.strides.row;
}

template <class E>
bool has_nan(const E* row, int64_t dim, int64_t col) {
  for (int64_t d = 0; d < dim; ++d)
    if (std::isnan(widen(row[d * col]))) return true;
  return false;
}

// What makes the gradients of every pair of a query row NaN by right. No other
// option can without making one of these NaN as well: a NaN in a mask, a slope,
// a sink or a query or key that is not capped is one in lse, one in a value or
// in grad_weights is one in delta.
template <class E>
struct GradRow {
  using T = Compute<E>;

  const Problem& p;
  const BackwardArgs& a;
  int64_t batch, head, query;

  bool lse_is_nan() const { return std::isnan(*row_of<T>(p, a.lse, batch, head, query)); }

  // delta = <grad_output, output> - grad_lse + grad_weights_dot
  bool delta_is_nan() const {
    T delta = 0;
    if (a.grad_output.data) {
      const E* grad_output = row_of<E>(p, a.grad_output, batch, head, query);
      const E* output = row_of<E>(p, a.output, batch, head, query);
      for (int64_t d = 0; d < p.head_dim_v; ++d)
        delta += widen(grad_output[d * a.grad_output.strides.col]) *
                 widen(output[d * a.output.strides.col]);
    }
    if (a.grad_lse.data) delta -= *row_of<T>(p, a.grad_lse, batch, head, query);
    if (a.grad_weights_dot.data) delta += *row_of<T>(p, a.grad_weights_dot, batch, head, query);
    return std::isnan(delta);
  }

  bool grad_output_is_nan(int64_t d) const {
    return a.grad_output.data && std::isnan(widen(row_of<E>(p, a.grad_output, batch, head,
                                                            query)[d * a.grad_output.strides.col]));
  }
};

template <class E>
bool grad_query_nan_by_right(const Problem& p, const BackwardArgs& a, int64_t batch, int64_t head,
                             int64_t query) {
  const GradRow<E> row{p, a, batch, head, query};
  if (!row.lse_is_nan() && !row.delta_is_nan()) return false;
  for (int64_t key = 0; key < p.seqlen_k; ++key)
    if (reference::attends(p, batch, head, query, key)) return true;
  return false;  // it sees nothing, its gradient is 0
}

// Whether every NaN in grad_key and grad_value of one key comes from a query
// that sees the key.
template <class E>
bool grad_key_value_nan_by_right(const Problem& p, const BackwardArgs& a, int64_t batch,
                                 int64_t kv_head, int64_t key) {
  const auto some_query = [&](const auto& holds) {
    for (int64_t head = kv_head * p.group(); head < (kv_head + 1) * p.group(); ++head)
      for (int64_t query = 0; query < p.seqlen_q; ++query)
        if (reference::attends(p, batch, head, query, key) &&
            holds(GradRow<E>{p, a, batch, head, query}))
          return true;
    return false;
  };
  if (some_query([](const GradRow<E>& row) { return row.lse_is_nan(); })) return true;
  if (a.grad_key.data &&
      has_nan(row_of<E>(p, a.grad_key, batch, kv_head, key), p.head_dim, a.grad_key.strides.col) &&
      !some_query([](const GradRow<E>& row) { return row.delta_is_nan(); }))
    return false;
  if (!a.grad_value.data) return true;
  const E* grad_value = row_of<E>(p, a.grad_value, batch, kv_head, key);
  for (int64_t d = 0; d < p.head_dim_v; ++d)
    if (std::isnan(widen(grad_value[d * a.grad_value.strides.col])) &&
        !some_query([d](const GradRow<E>& row) { return row.grad_output_is_nan(d); }))
      return false;
  return true;
}

}  // namespace

void repair_output(const Problem& p, const ForwardResult& result, int64_t batch, int64_t kv_head,
                   int64_t row, double sum) {
  if (std::isnan(sum)) return;  // a NaN score or sink makes every output NaN
  const int64_t group = p.group();
  reference::output_row(p, result, batch, kv_head * group + row % group, row / group);
}

void repair_grad_query(const Problem& p, const BackwardArgs& args, int64_t batch, int64_t kv_head,
                       int64_t row) {
  const int64_t group = p.group(), head = kv_head * group + row % group, query = row / group;
  const bool right = with_type(p.dtype, [&](auto e) {
    return grad_query_nan_by_right<decltype(e)>(p, args, batch, head, query);
  });
  if (!right) reference::grad_query_row(p, args, batch, head, query);
}

void repair_grad_key_value(const Problem& p, const BackwardArgs& args, int64_t batch,
                           int64_t kv_head, int64_t key) {
  const bool right = with_type(p.dtype, [&](auto e) {
    return grad_key_value_nan_by_right<decltype(e)>(p, args, batch, kv_head, key);
  });
  if (!right) reference::grad_key_value_row(p, args, batch, kv_head, key);
}

}  // namespace qkv
