// One query head in the backward pass: the tensors that it reads besides those of Head, its
// weights, and the gradient of a score, each under the formula that it follows from.
#pragma once

#include <vector>

#include "reference/head.h"

namespace qkv::reference {

struct BackwardHead : Head {
  InputView output;        // [L, Dv]
  InputView lse;           // [L, 1]
  InputView grad_output;   // [L, Dv] or null
  InputView grad_lse;      // [L, 1] or null
  InputView grad_weights;  // [L, S] or null
  InputView row_sums;      // [L, 2], of f64

  BackwardHead(const Problem& p, const BackwardArgs& a, int64_t b, int64_t h)
      : Head(p, b, h),
        output(p, a.output, type_of(p.dtype), b, h),
        lse(p, a.lse, type_of(compute_type(p.dtype)), b, h),
        grad_output(p, a.grad_output, type_of(p.dtype), b, h),
        grad_lse(p, a.grad_lse, type_of(compute_type(p.dtype)), b, h),
        grad_weights(p, a.grad_weights, type_of(compute_type(p.dtype)), b, h),
        row_sums(p, a.row_sums, Type::f64, b, h) {}

  // The weights of the forward pass, before dropout, follow from its lse:
  //   softmax_ij = exp(score_ij - lse_i)
  // They are divided by what they add up to, since lse is rounded.
  double softmax(int64_t i, int64_t j) const {
    return lse(i, 0) == -kInf ? 0 : std::exp(score(i, j) - lse(i, 0)) / sum(i);
  }
  double softmax_of_sink(int64_t i) const {
    return lse(i, 0) == -kInf ? 0 : share_of_sink(i, lse(i, 0)) / sum(i);
  }
  double sum(int64_t i) const { return row_sums ? row_sums(i, 1) : 1; }

  // The gradient of weight_ij comes through
  //   output_id = sum_j weight_ij * value_jd
  // and is added to what the caller gives as the gradient of the weights themselves.
  double grad_weight(int64_t i, int64_t j) const {
    double sum = grad_weights ? grad_weights(i, j) : 0;
    if (grad_output)
      for (int64_t d = 0; d < p.head_dim_v; ++d) sum += grad_output(i, d) * value(j, d);
    return sum;
  }

  // All gradients of scores of row i have a term in common, which comes through lse_i:
  //   delta_i = sum_j weight_ij * grad_weight_ij - grad_lse_i
  double delta(int64_t i) const {
    return grad_lse ? row_sums(i, 0) - grad_lse(i, 0) : row_sums(i, 0);
  }
  // What reaches the sink: the sum has no terms in a row that sees nothing, whatever grad_output
  // is.
  double delta_of_sink(int64_t i) const {
    return sees_any(i) ? delta(i) : grad_lse ? -grad_lse(i, 0) : 0;
  }
  // Where only the output has a gradient, the sum needs no weights (and is 0 without keys, where
  // there may be no output):
  //   sum_j weight_ij * (sum_d grad_output_id * value_jd) = sum_d grad_output_id * output_id
  double dot(int64_t i) const {
    double sum = 0;
    for (int64_t d = 0; grad_output && output && d < p.head_dim_v; ++d)
      sum += grad_output(i, d) * output(i, d);
    return sum;
  }

  // The gradient of score_ij comes through
  //   weight_ij = keep_ij * exp(score_ij - lse_i)
  //   lse_i = log(exp(sink) + sum_j exp(score_ij))
  double grad_score(int64_t i, int64_t j, double softmax_ij, double delta_i) const {
    return softmax_ij * (keep(i, j) * grad_weight(i, j) - delta_i);
  }
};

// Computes BackwardArgs::row_sums of `args` into the vector that it returns, which must outlive
// them.
std::vector<double> add_row_sums(const Problem& p, BackwardArgs& args);

}  // namespace qkv::reference
