// Gradients that are sums: over the queries of all heads that share a key, and over the elements of
// a mask.
#pragma once

#include <vector>

#include "reference/head.h"

namespace qkv::reference {

// The gradients of the keys and values of key/value head hk.
struct KeySums {
  const Problem& p;
  std::vector<double> key, value;  // [S, D], [S, Dv]

  explicit KeySums(const Problem& p)
      : p(p), key(p.seqlen_k * p.head_dim), value(p.seqlen_k * p.head_dim_v) {}

  // key_j += factor * row_i, where that is given
  void add_to_key(int64_t j, double factor, const InputView& row, int64_t i) {
    for (int64_t d = 0; row && d < p.head_dim; ++d) key[j * p.head_dim + d] += factor * row(i, d);
  }
  // value_j += factor * row_i, where that is given
  void add_to_value(int64_t j, double factor, const InputView& row, int64_t i) {
    for (int64_t d = 0; row && d < p.head_dim_v; ++d)
      value[j * p.head_dim_v + d] += factor * row(i, d);
  }

  void write(const BackwardArgs& a, int64_t b, int64_t hk) const {
    const OutputView grad_key(p, a.grad_key, type_of(p.dtype), b, hk);
    const OutputView grad_value(p, a.grad_value, type_of(p.dtype), b, hk);
    for (int64_t j = 0; j < p.seqlen_k; ++j) {
      for (int64_t d = 0; d < p.head_dim; ++d) grad_key.set(j, d, key[j * p.head_dim + d]);
      for (int64_t d = 0; d < p.head_dim_v; ++d) grad_value.set(j, d, value[j * p.head_dim_v + d]);
    }
  }
};

// The gradients of what is added to the scores of head h, which are those of the scores, or sums of
// them: of one mask, and of the slope.
struct MaskSums {
  OutputView each, keys, queries;
  std::vector<double> of_keys;

  MaskSums(const Problem& p, const GradMask& grad, int64_t b, int64_t h)
      : each(p, grad.each, type_of(compute_type(p.dtype)), b, h),
        keys(p, grad.keys, type_of(compute_type(p.dtype)), b, h),
        queries(p, grad.queries, type_of(compute_type(p.dtype)), b, h),
        of_keys(p.seqlen_k) {}
};
struct ScoreSums {
  const Head& head;
  std::vector<MaskSums> masks;
  double of_row = 0, slope = 0;

  ScoreSums(const Head& of, const BackwardArgs& a) : head(of) {
    for (const GradMask& grad : a.grad_masks) masks.emplace_back(of.p, grad, of.b, of.h);
  }

  // score_ij = ... - slope * |i + S - L - j| + sum_m mask_m,ij
  void add(int64_t i, int64_t j, double score) {
    for (MaskSums& mask : masks) mask.each.add(i, j, score), mask.of_keys[j] += score;
    of_row += score;
    slope -= score * double(std::abs(head.ahead(i, j)));
  }
  void end_row(int64_t i) {
    for (MaskSums& mask : masks) mask.queries.set(i, 0, of_row);
    of_row = 0;
  }
  void write(const BackwardArgs& a) const {
    for (const MaskSums& mask : masks)
      for (int64_t j = 0; j < head.p.seqlen_k; ++j) mask.keys.set(0, j, mask.of_keys[j]);
    OutputView(head.p, a.grad_by_head[kAlibiSlopes], Type::f64, head.b, head.h).set(0, 0, slope);
  }
};

}  // namespace qkv::reference
