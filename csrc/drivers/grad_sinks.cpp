// The gradient of the sinks.
#include <algorithm>
#include <cmath>

#include "attention_jvp.h"
#include "common/half.h"
#include "common/row_sums.h"
#include "common/strides.h"
#include "dispatch/kernel_table.h"
#include "plane_sums.h"

namespace qkv {
namespace {

// The number of one row in a tensor [B..., H, L]; 0 if there is no such tensor.
template <class E>
double value_at(const Problem& p, const Input& t, int64_t batch, int64_t head, int64_t query) {
  return t.data ? double(widen(query_plane<E>(p, t, batch, head)[query * t.strides.row])) : 0;
}

// <grad_output_i, output_i> of one row i; 0 without an output, as where there are no keys.
template <class E>
double output_dot(const Problem& p, const BackwardArgs& a, const Input& output, int64_t batch,
                  int64_t head, int64_t query) {
  if (!a.grad_output.data || !output.data) return 0;
  double sum = 0;
  const Strides &g = a.grad_output.strides, &o = output.strides;
  const E* grad_output = query_plane<E>(p, a.grad_output, batch, head) + query * g.row;
  const E* row = query_plane<E>(p, output, batch, head) + query * o.row;
  for (int64_t d = 0; d < p.head_dim_v; ++d)
    sum += double(widen(grad_output[d * g.col])) * double(widen(row[d * o.col]));
  return sum;
}

// What the share of the sink in the softmax of a row, exp(sink - lse), is multiplied by in the
// gradient: delta_i = sum_j weight_ij * grad_weight_ij - grad_lse_i. With a direction the product
// of both changes, by the share times (sink' - lse'_i) * delta_i + <grad_output_i, output'_i>.
// `sums`: what BackwardArgs::row_sums has of the row; null where sums_row() says no.
template <class E>
double grad_share(const Problem& p, const BackwardArgs& a, int64_t batch, int64_t head,
                  int64_t query, const Compute<E>* sums) {
  using T = Compute<E>;
  const double weighted = sums ? sums[0] : output_dot<E>(p, a, a.output, batch, head, query);
  const double delta = weighted - value_at<T>(p, a.grad_lse, batch, head, query);
  if (!a.direction) return delta;
  const BackwardDirection& direction = *a.direction;
  const double* sink_jvp = plane<double>(p, direction.along.by_head[kSinks], batch, head);
  return ((sink_jvp ? *sink_jvp : 0) - value_at<T>(p, direction.lse_jvp, batch, head, query)) *
             delta +
         output_dot<E>(p, a, direction.output_jvp, batch, head, query);
}

// Whether the backward pass has an output that tells rows which see nothing from others.
bool has_output(const Problem& p, const BackwardArgs& a) {
  return a.output.data && p.head_dim_v > 0;
}

// Whether a row with a log-sum-exp other than -inf sees nothing: its output is 0, and its lse is
// the sink, whose share in the softmax is 1. How far from 1 rounding takes the share, the smaller
// of the two says: beside a large lse that of a small sink would pass for whole. Beside a sink that
// is NaN or +inf, the output of a row that sees a key is NaN. One of -inf has no share.
template <class E>
bool sees_nothing(const Problem& p, const BackwardArgs& a, int64_t batch, int64_t head,
                  int64_t query, double sink, double lse, double share) {
  if (!has_output(p, a) || share == 0) return false;
  const double least = std::min(std::abs(lse), std::abs(sink));
  if (std::isfinite(share) && !are_whole(share, Compute<E>(least))) return false;
  const Strides& o = a.output.strides;
  const E* row = query_plane<E>(p, a.output, batch, head) + query * o.row;
  for (int64_t d = 0; d < p.head_dim_v; ++d)
    if (widen(row[d * o.col]) != 0) return false;
  return true;
}

// exp(sink - lse), the share of the sink in the softmax of a row. Without an output every row
// passes for one that sees nothing, where it is 1 even if the sink is NaN or +inf: then the weights
// have a gradient, and delta is NaN where they are.
double share_of_sink(const Problem& p, const BackwardArgs& a, double sink, double share) {
  return std::isnan(share) && !std::isfinite(sink) && !has_output(p, a) ? 1 : share;
}

//   grad_sink = -sum_i exp(sink - lse_i) * grad_share_i
// The output of a row that sees nothing is 0 whatever the sink is, so that a gradient of it which
// is not finite changes nothing, and the log-sum-exp is the sink itself.
template <class E>
void grad_sink(const Problem& p, const BackwardArgs& a, int64_t batch, int64_t head) {
  using T = Compute<E>;
  const double* sink = plane<double>(p, p.by_head[kSinks], batch, head);
  const auto exp = kernels_for(p, a).exp;
  double grad = 0;
  for (int64_t query = 0; sink && query < p.seqlen_q; ++query) {
    const double lse = value_at<T>(p, a.lse, batch, head, query);
    if (lse == -HUGE_VAL) continue;
    const double share = exp(*sink - lse);
    if (sees_nothing<E>(p, a, batch, head, query, *sink, lse, share)) {
      if (!a.direction) grad += value_at<T>(p, a.grad_lse, batch, head, query);
      continue;
    }
    const T* sums = nullptr;
    if (sums_row(p, a, lse))
      sums = query_plane<T>(p, a.row_sums, batch, head) + query * a.row_sums.strides.row;
    grad -= share_of_sink(p, a, *sink, share) / (sums ? sums[1] : 1) *
            grad_share<E>(p, a, batch, head, query, sums);
  }
  *plane<double>(p, a.grad_by_head[kSinks], batch, head) = grad;
}

}  // namespace

void grad_sink(const Problem& p, const BackwardArgs& args, int64_t batch, int64_t head) {
  with_type(p.dtype, [&](auto e) { grad_sink<decltype(e)>(p, args, batch, head); });
}

}  // namespace qkv
