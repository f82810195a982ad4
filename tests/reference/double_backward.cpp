// The changes of gradients in a direction (attention_jvp.h): each line is the
// derivative of one in backward.cpp or backward_head.h.
#include <cmath>
#include <vector>

#include "attention_jvp.h"
#include "reference/backward_head.h"
#include "reference/directions.h"
#include "reference/reference.h"

namespace qkv::reference {
namespace {

struct DoubleHead : BackwardHead {
  Directions along;
  InputView output_jvp, lse_jvp;

  DoubleHead(const Problem& p, const BackwardArgs& a, int64_t b, int64_t h)
      : BackwardHead(p, a, b, h),
        along(*this, a.direction->along),
        output_jvp(p, a.direction->output_jvp, type_of(p.dtype), b, h),
        lse_jvp(p, a.direction->lse_jvp, type_of(compute_type(p.dtype)), b, h) {}

  double softmax_jvp(int64_t i, int64_t j) const {
    return softmax(i, j) * (along.score(i, j) - lse_jvp(i, 0));
  }
  double grad_weight_jvp(int64_t i, int64_t j) const {
    double sum = 0;
    if (grad_output && along.value)
      for (int64_t d = 0; d < p.head_dim_v; ++d) sum += grad_output(i, d) * along.value(j, d);
    return sum;
  }
  double delta_jvp(int64_t i) const {
    double sum = 0;
    if (grad_output)
      for (int64_t d = 0; d < p.head_dim_v; ++d) sum += grad_output(i, d) * output_jvp(i, d);
    return sum;
  }
};

// The gradient of one score, of the dot product that it is made of, and of the weight for its
// value, and how these change.
struct Pair {
  double dot = 0, score_jvp = 0, dot_jvp = 0, weight_jvp = 0;

  // `delta` is that of row i, as is delta_jvp.
  Pair(const DoubleHead& head, int64_t i, int64_t j, double delta, double delta_jvp) {
    const double difference = head.keep(i, j) * head.grad_weight(i, j) - delta;
    const double score = head.softmax(i, j) * difference, softmax_jvp = head.softmax_jvp(i, j);
    score_jvp = softmax_jvp * difference +
                head.softmax(i, j) * (head.keep(i, j) * head.grad_weight_jvp(i, j) - delta_jvp);
    dot = head.grad_dot(i, j) * score;
    dot_jvp = head.grad_dot(i, j) * score_jvp;
    if (head.p.softcap > 0) dot_jvp += head.curve_of_dot(i, j) * head.along.dot(i, j) * score;
    weight_jvp = head.keep(i, j) * softmax_jvp;
  }
};

// The sums over the heads of one key/value head.
struct KeySums {
  std::vector<double> key, value;  // [S, D], [S, Dv]

  explicit KeySums(const Problem& p)
      : key(p.seqlen_k * p.head_dim), value(p.seqlen_k * p.head_dim_v) {}

  void add(const DoubleHead& head, int64_t i, int64_t j, const Pair& pair) {
    const int64_t D = head.p.head_dim, Dv = head.p.head_dim_v;
    for (int64_t d = 0; d < D; ++d) {
      key[j * D + d] += pair.dot_jvp * head.query(i, d);
      if (head.along.query) key[j * D + d] += pair.dot * head.along.query(i, d);
    }
    for (int64_t d = 0; d < Dv && head.grad_output; ++d)
      value[j * Dv + d] += pair.weight_jvp * head.grad_output(i, d);
  }
};

// Where the gradients of the masks of one head go.
struct MaskSums {
  OutputView each, keys, queries;
  std::vector<double> of_keys;

  MaskSums(const Problem& p, const BackwardArgs& a, int m, int64_t b, int64_t h)
      : each(p, a.grad_masks[m].each, type_of(compute_type(p.dtype)), b, h),
        keys(p, a.grad_masks[m].keys, type_of(compute_type(p.dtype)), b, h),
        queries(p, a.grad_masks[m].queries, type_of(compute_type(p.dtype)), b, h),
        of_keys(p.seqlen_k) {}
};

void double_head(const Problem& p, const BackwardArgs& a, int64_t b, int64_t h, KeySums& sums) {
  const DoubleHead head(p, a, b, h);
  const OutputView grad_query(p, a.grad_query, type_of(p.dtype), b, h);
  std::vector<MaskSums> masks;
  for (int m = 0; m < kMasks; ++m) masks.emplace_back(p, a, m, b, h);
  double slope = 0, sink = 0;
  for (int64_t i = 0; i < p.seqlen_q; ++i) {
    const double delta = head.delta(i), delta_jvp = head.delta_jvp(i);
    std::vector<double> query(p.head_dim);
    double row = 0;
    for (int64_t j = 0; j < p.seqlen_k; ++j) {
      if (!head.attends(i, j)) continue;
      const Pair pair(head, i, j, delta, delta_jvp);
      for (int64_t d = 0; d < p.head_dim; ++d) {
        query[d] += pair.dot_jvp * head.key(j, d);
        if (head.along.key) query[d] += pair.dot * head.along.key(j, d);
      }
      sums.add(head, i, j, pair);
      for (MaskSums& mask : masks) {
        mask.each.add(i, j, pair.score_jvp);
        mask.of_keys[j] += pair.score_jvp;
      }
      row += pair.score_jvp;
      slope -= pair.score_jvp * double(std::abs(head.ahead(i, j)));
    }
    for (int64_t d = 0; d < p.head_dim; ++d) grad_query.set(i, d, query[d]);
    for (MaskSums& mask : masks) mask.queries.set(i, 0, row);
    if (head.lse(i, 0) == -kInf) continue;
    const double sink_jvp = head.along.sinks ? head.along.sinks(0, 0) : 0;
    sink -= head.softmax_of_sink(i) * ((sink_jvp - head.lse_jvp(i, 0)) * delta + delta_jvp);
  }
  for (MaskSums& mask : masks)
    for (int64_t j = 0; j < p.seqlen_k; ++j) mask.keys.set(0, j, mask.of_keys[j]);
  OutputView(p, a.grad_by_head[kAlibiSlopes], Type::f64, b, h).set(0, 0, slope);
  OutputView(p, a.grad_by_head[kSinks], Type::f64, b, h).set(0, 0, sink);
}

}  // namespace

void attention_double_backward(const Problem& p, const BackwardArgs& a) {
  for (int64_t b = 0; b < p.batch(); ++b) {
    for (int64_t hk = 0; hk < p.kv_heads; ++hk) {
      KeySums sums(p);
      for (int64_t h = hk * p.group(); h < (hk + 1) * p.group(); ++h) double_head(p, a, b, h, sums);
      const OutputView grad_key(p, a.grad_key, type_of(p.dtype), b, hk);
      const OutputView grad_value(p, a.grad_value, type_of(p.dtype), b, hk);
      for (int64_t j = 0; j < p.seqlen_k; ++j) {
        for (int64_t d = 0; d < p.head_dim; ++d) grad_key.set(j, d, sums.key[j * p.head_dim + d]);
        for (int64_t d = 0; d < p.head_dim_v; ++d)
          grad_value.set(j, d, sums.value[j * p.head_dim_v + d]);
      }
    }
  }
}

}  // namespace qkv::reference
