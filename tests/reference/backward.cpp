#include <vector>

#include "reference/backward_head.h"
#include "reference/reference.h"

namespace qkv::reference {
namespace {

// Writes grad_query[b, h, i, :], in time S * (D + Dv).
void grad_query_row(const Problem& p, const BackwardArgs& a, int64_t b, int64_t h, int64_t i) {
  const BackwardHead head(p, a, b, h);
  const OutputView grad_query(p, a.grad_query, type_of(p.dtype), b, h);
  // score_ij depends on query_i through dot_ij = sum_d query_id * key_jd.
  const double delta = head.delta(i);
  std::vector<double> sums(p.head_dim);
  for (int64_t j = 0; j < p.seqlen_k; ++j) {
    if (!head.attends(i, j)) continue;
    const double grad = head.grad_score(i, j, delta) * head.grad_dot(i, j);
    for (int64_t d = 0; d < p.head_dim; ++d) sums[d] += grad * head.key(j, d);
  }
  for (int64_t d = 0; d < p.head_dim; ++d) grad_query.set(i, d, sums[d]);
}

// Calls f(head, i) for every query i of every query head that sees key j of key/value head hk.
template <class F>
void for_each_query(const Problem& p, const BackwardArgs& a, int64_t b, int64_t hk, int64_t j,
                    F f) {
  for (int64_t h = hk * p.group(); h < (hk + 1) * p.group(); ++h) {
    const BackwardHead head(p, a, b, h);
    for (int64_t i = 0; i < p.seqlen_q; ++i)
      if (head.attends(i, j)) f(head, i);
  }
}

// Writes grad_key[b, hk, j, :] and grad_value[b, hk, j, :], in time H / Hkv * L * (D + Dv).
void grad_key_value_row(const Problem& p, const BackwardArgs& a, int64_t b, int64_t hk, int64_t j) {
  const OutputView grad_key(p, a.grad_key, type_of(p.dtype), b, hk);
  const OutputView grad_value(p, a.grad_value, type_of(p.dtype), b, hk);
  // score_ij depends on key_j through dot_ij = sum_d query_id * key_jd.
  std::vector<double> keys(grad_key ? p.head_dim : 0);
  for_each_query(p, a, b, hk, j, [&](const BackwardHead& head, int64_t i) {
    const double grad = head.grad_score(i, j, head.delta(i)) * head.grad_dot(i, j);
    for (size_t d = 0; d < keys.size(); ++d) keys[d] += grad * head.query(i, d);
  });
  for (size_t d = 0; d < keys.size(); ++d) grad_key.set(j, d, keys[d]);
  // output_id = sum_j weight_ij * value_jd
  std::vector<double> values(grad_value ? p.head_dim_v : 0);
  for_each_query(p, a, b, hk, j, [&](const BackwardHead& head, int64_t i) {
    const double weight = head.weight(i, j);
    for (size_t d = 0; d < values.size() && head.grad_output; ++d)
      values[d] += weight * head.grad_output(i, d);
  });
  for (size_t d = 0; d < values.size(); ++d) grad_value.set(j, d, values[d]);
}

// Writes the gradients of one mask of head h: that of each element, or its sums.
void grad_mask(const Problem& p, const BackwardArgs& a, int m, int64_t b, int64_t h) {
  const GradMask& grad = a.grad_masks[m];
  if (!grad.each.data && !grad.keys.data && !grad.queries.data) return;
  const BackwardHead head(p, a, b, h);
  const Type compute = type_of(compute_type(p.dtype));
  const OutputView each(p, grad.each, compute, b, h), keys(p, grad.keys, compute, b, h),
      queries(p, grad.queries, compute, b, h);
  std::vector<double> sums(p.seqlen_k);
  for (int64_t i = 0; i < p.seqlen_q; ++i) {
    const double delta = head.delta(i);
    double query = 0;
    for (int64_t j = 0; j < p.seqlen_k; ++j) {
      if (!head.attends(i, j)) continue;
      // score_ij = ... + sum_m mask_m,ij
      const double score = head.grad_score(i, j, delta);
      each.add(i, j, score);
      sums[j] += score;
      query += score;
    }
    queries.set(i, 0, query);
  }
  for (int64_t j = 0; j < p.seqlen_k; ++j) keys.set(0, j, sums[j]);
}

// Writes the gradients of the slope and the sink of head h.
void grad_per_head(const Problem& p, const BackwardArgs& a, int64_t b, int64_t h) {
  const BackwardHead head(p, a, b, h);
  const OutputView grad_slope(p, a.grad_by_head[kAlibiSlopes], Type::f64, b, h);
  const OutputView grad_sink(p, a.grad_by_head[kSinks], Type::f64, b, h);
  double slope = 0, sink = 0;
  for (int64_t i = 0; i < p.seqlen_q; ++i) {
    const double delta = head.delta(i);
    // score_ij = ... - slope * |i + S - L - j| + ...
    for (int64_t j = 0; j < p.seqlen_k; ++j)
      if (head.attends(i, j))
        slope -= head.grad_score(i, j, delta) * double(std::abs(head.ahead(i, j)));
    // lse_i = log(exp(sink) + sum_j exp(score_ij))
    if (head.lse(i, 0) != -kInf) sink -= head.softmax_of_sink(i) * delta;
  }
  grad_slope.set(0, 0, slope);
  grad_sink.set(0, 0, sink);
}

}  // namespace

void attention_backward(const Problem& p, const BackwardArgs& args) {
  BackwardArgs a = args;
  const std::vector<double> row_sums = add_row_sums(p, a);
  if (a.direction) return attention_double_backward(p, a);
  for (int64_t b = 0; b < p.batch(); ++b) {
    for (int64_t h = 0; h < p.heads; ++h) {
      if (a.grad_query.data)
        for (int64_t i = 0; i < p.seqlen_q; ++i) grad_query_row(p, a, b, h, i);
      for (int m = 0; m < kMasks; ++m) grad_mask(p, a, m, b, h);
      if (a.grad_by_head[kAlibiSlopes].data || a.grad_by_head[kSinks].data)
        grad_per_head(p, a, b, h);
    }
    if (!a.grad_key.data && !a.grad_value.data) continue;
    for (int64_t hk = 0; hk < p.kv_heads; ++hk)
      for (int64_t j = 0; j < p.seqlen_k; ++j) grad_key_value_row(p, a, b, hk, j);
  }
}

}  // namespace qkv::reference
