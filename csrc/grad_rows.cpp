#include "grad_rows.h"

#include <cmath>

#include "strides.h"

namespace qkv {
namespace {

template <class T>
double value_at(const Problem& p, const Input& t, int64_t batch, int64_t head, int64_t query) {
  return t.data ? double(plane<T>(p, t, batch, head)[query * t.strides.row]) : 0;
}

// sum_j weight_ij * grad_weight_ij, whether that reaches the weights through the
// output or directly.
template <class T>
double weighted_grad(const Problem& p, const BackwardArgs& a, int64_t batch, int64_t head,
                     int64_t query) {
  double sum = value_at<T>(p, a.grad_weights_dot, batch, head, query);
  if (!a.grad_output.data) return sum;
  const Strides &g = a.grad_output.strides, &o = a.output.strides;
  const T* grad_output = plane<T>(p, a.grad_output, batch, head) + query * g.row;
  const T* output = plane<T>(p, a.output, batch, head) + query * o.row;
  for (int64_t d = 0; d < p.head_dim_v; ++d)
    sum += double(grad_output[d * g.col]) * double(output[d * o.col]);
  return sum;
}

// With    p = exp(sink - lse)    the sink's share of the softmax, and dlse the
// gradient of lse:
//   grad_sink       = -sum_i p_i * (weighted_grad_i - dlse_i)
//   grad_mask_query = sum_j weight_ij * (grad_weight_ij - weighted_grad_i + dlse_i)
//                   = p_i * weighted_grad_i + (1 - p_i) * dlse_i
template <class T>
void grad_rows(const Problem& p, const BackwardArgs& a, int64_t batch, int64_t head) {
  const double* sink = plane<double>(p, p.sinks, batch, head);
  T* grad_mask = plane<T>(p, a.grad_mask_queries, batch, head);
  double grad_sink = 0;
  for (int64_t query = 0; query < p.seqlen_q; ++query) {
    const double lse = value_at<T>(p, a.lse, batch, head, query);
    double grad = 0;
    if (lse != -HUGE_VAL) {
      const double share = sink ? std::exp(*sink - lse) : 0;
      const double weighted = weighted_grad<T>(p, a, batch, head, query);
      const double grad_lse = value_at<T>(p, a.grad_lse, batch, head, query);
      grad_sink -= share * (weighted - grad_lse);
      grad = share * weighted + (1 - share) * grad_lse;
    }
    if (grad_mask) grad_mask[query * a.grad_mask_queries.strides.row] = T(grad);
  }
  if (a.grad_sinks.data) *plane<double>(p, a.grad_sinks, batch, head) = grad_sink;
}

}  // namespace

void grad_rows(const Problem& p, const BackwardArgs& args, int64_t batch, int64_t head) {
  (p.dtype == DType::f32 ? grad_rows<float> : grad_rows<double>)(p, args, batch, head);
}

}  // namespace qkv
