#include "grad_sinks.h"

#include <cmath>

#include "common/half.h"
#include "common/strides.h"

namespace qkv {
namespace {

// The number of one row in a tensor [B..., H, L]; 0 if there is no such tensor.
template <class E>
double value_at(const Problem& p, const Input& t, int64_t batch, int64_t head, int64_t query) {
  return t.data ? double(plane<E>(p, t, batch, head)[query * t.strides.row]) : 0;
}

// sum_j weight_ij * grad_weight_ij of one row i, where grad_weight is all that reaches the weights:
// through the output, and directly (BackwardArgs::grad_weights).
template <class E>
double weighted_grad(const Problem& p, const BackwardArgs& a, int64_t batch, int64_t head,
                     int64_t query) {
  double sum = value_at<Compute<E>>(p, a.grad_weights_dot, batch, head, query);
  if (!a.grad_output.data) return sum;
  const Strides &g = a.grad_output.strides, &o = a.output.strides;
  const E* grad_output = plane<E>(p, a.grad_output, batch, head) + query * g.row;
  const E* output = plane<E>(p, a.output, batch, head) + query * o.row;
  for (int64_t d = 0; d < p.head_dim_v; ++d)
    sum += double(widen(grad_output[d * g.col])) * double(widen(output[d * o.col]));
  return sum;
}

//   grad_sink = -sum_i p_i * (sum_j weight_ij * grad_weight_ij - grad_lse_i)
// where p_i = exp(sink - lse_i) is the share of the sink in the softmax of row i.
template <class E>
void grad_sink(const Problem& p, const BackwardArgs& a, int64_t batch, int64_t head) {
  using T = Compute<E>;
  const double* sink = plane<double>(p, p.sinks, batch, head);
  double grad = 0;
  for (int64_t query = 0; sink && query < p.seqlen_q; ++query) {
    const double lse = value_at<T>(p, a.lse, batch, head, query);
    if (lse == -HUGE_VAL) continue;
    grad -= std::exp(*sink - lse) * (weighted_grad<E>(p, a, batch, head, query) -
                                     value_at<T>(p, a.grad_lse, batch, head, query));
  }
  *plane<double>(p, a.grad_sinks, batch, head) = grad;
}

}  // namespace

void grad_sink(const Problem& p, const BackwardArgs& args, int64_t batch, int64_t head) {
  with_type(p.dtype, [&](auto e) { grad_sink<decltype(e)>(p, args, batch, head); });
}

}  // namespace qkv
