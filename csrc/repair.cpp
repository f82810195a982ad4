#include "repair.h"

#include <cmath>
#include <limits>
#include <vector>

#include "reference/reference.h"
#include "strides.h"

namespace qkv {
namespace {

// Row `row` (query row for query-side tensors, key row for key-side ones).
template <class T, class Tensor>
auto* row_of(const Problem& p, const Tensor& t, int64_t batch, int64_t head, int64_t row) {
  return plane<T>(p, t, batch, head) + row * t.strides.row;
}

// What makes gradients of a query row NaN by right.
template <class T>
struct GradRow {
  T lse, delta;  // delta = <grad_output, output> - grad_lse
  const T* grad_output;

  GradRow(const Problem& p, const BackwardArgs& a, int64_t batch, int64_t head, int64_t query)
      : lse(*row_of<T>(p, a.lse, batch, head, query)), delta(0), grad_output(nullptr) {
    if (a.grad_output.data) {
      grad_output = row_of<T>(p, a.grad_output, batch, head, query);
      const T* output = row_of<T>(p, a.output, batch, head, query);
      for (int64_t d = 0; d < p.head_dim_v; ++d)
        delta += grad_output[d * a.grad_output.strides.col] * output[d * a.output.strides.col];
    }
    if (a.grad_lse.data) delta -= *row_of<T>(p, a.grad_lse, batch, head, query);
  }

  bool attends() const { return lse != -std::numeric_limits<T>::infinity(); }
};

template <class T>
void repair_grad_query(const Problem& p, const BackwardArgs& a, int64_t batch, int64_t head,
                       int64_t query) {
  const GradRow<T> row(p, a, batch, head, query);
  if (row.attends() && (std::isnan(row.lse) || std::isnan(row.delta))) return;
  reference::grad_query_row(p, a, batch, head, query);
}

// Whether every NaN in grad_key and grad_value of one key comes from a query
// that sees the key.
template <class T>
bool nan_by_right(const Problem& p, const BackwardArgs& a, int64_t batch, int64_t kv_head,
                  int64_t key) {
  bool key_open = a.grad_key.data != nullptr;  // not explained yet
  std::vector<int64_t> open;                   // columns of grad_value, likewise
  if (a.grad_value.data) {
    const T* grad_value = row_of<T>(p, a.grad_value, batch, kv_head, key);
    for (int64_t d = 0; d < p.head_dim_v; ++d)
      if (std::isnan(grad_value[d * a.grad_value.strides.col])) open.push_back(d);
  }
  for (int64_t head = kv_head * p.group(); head < (kv_head + 1) * p.group(); ++head) {
    for (int64_t query = 0; query < p.seqlen_q; ++query) {
      if (!reference::attends(p, batch, head, query, key)) continue;
      const GradRow<T> row(p, a, batch, head, query);
      if (std::isnan(row.lse)) return true;
      if (std::isnan(row.delta)) key_open = false;
      size_t left = 0;
      for (int64_t d : open)
        if (!row.grad_output || !std::isnan(row.grad_output[d * a.grad_output.strides.col]))
          open[left++] = d;
      open.resize(left);
      if (!key_open && open.empty()) return true;
    }
  }
  return false;
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
  (p.dtype == DType::f32 ? repair_grad_query<float> : repair_grad_query<double>)(p, args, batch,
                                                                                 head, query);
}

void repair_grad_key_value(const Problem& p, const BackwardArgs& args, int64_t batch,
                           int64_t kv_head, int64_t key) {
  const bool right = p.dtype == DType::f32 ? nan_by_right<float>(p, args, batch, kv_head, key)
                                           : nan_by_right<double>(p, args, batch, kv_head, key);
  if (!right) reference::grad_key_value_row(p, args, batch, kv_head, key);
}

}  // namespace qkv
