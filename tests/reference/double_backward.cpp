// The changes of gradients in a direction (attention_jvp.h): each line is the
// derivative of one in backward.cpp or backward_head.h.
#include <cmath>
#include <vector>

#include "attention_jvp.h"
#include "reference/backward_head.h"
#include "reference/directions.h"
#include "reference/reference.h"
#include "reference/sums.h"

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

  double softmax_jvp(int64_t i, int64_t j, double softmax_ij) const {
    return softmax_ij * (along.score(i, j) - lse_jvp(i, 0));
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
    const double softmax = head.softmax(i, j), softmax_jvp = head.softmax_jvp(i, j, softmax);
    const double keep = head.keep(i, j), grad_dot = head.grad_dot(i, j);
    const double difference = keep * head.grad_weight(i, j) - delta;
    const double score = softmax * difference;
    score_jvp =
        softmax_jvp * difference + softmax * (keep * head.grad_weight_jvp(i, j) - delta_jvp);
    dot = grad_dot * score;
    dot_jvp = grad_dot * score_jvp;
    if (head.p.softcap > 0) dot_jvp += head.curve_of_dot(i, j) * head.along.dot(i, j) * score;
    weight_jvp = keep * softmax_jvp;
  }
};

void double_head(const Problem& p, const BackwardArgs& a, int64_t b, int64_t h, KeySums& keys) {
  const DoubleHead head(p, a, b, h);
  const OutputView grad_query(p, a.grad_query, type_of(p.dtype), b, h);
  ScoreSums scores(head, a);
  double sink = 0;
  for (int64_t i = 0; i < p.seqlen_q; ++i) {
    const double delta = head.delta(i), delta_jvp = head.delta_jvp(i);
    std::vector<double> query(p.head_dim);
    for (int64_t j = 0; j < p.seqlen_k; ++j) {
      if (!head.attends(i, j)) continue;
      const Pair pair(head, i, j, delta, delta_jvp);
      for (int64_t d = 0; d < p.head_dim; ++d) {
        query[d] += pair.dot_jvp * head.key(j, d);
        if (head.along.key) query[d] += pair.dot * head.along.key(j, d);
      }
      keys.add_to_key(j, pair.dot_jvp, head.query, i);
      keys.add_to_key(j, pair.dot, head.along.query, i);
      keys.add_to_value(j, pair.weight_jvp, head.grad_output, i);
      scores.add(i, j, pair.score_jvp);
    }
    for (int64_t d = 0; d < p.head_dim; ++d) grad_query.set(i, d, query[d]);
    scores.end_row(i);
    if (head.lse(i, 0) == -kInf || !head.sees_any(i)) continue;  // lse_i is the sink, if any
    const double sink_jvp = head.along.sinks ? head.along.sinks(0, 0) : 0;
    sink -= head.softmax_of_sink(i) * ((sink_jvp - head.lse_jvp(i, 0)) * delta + delta_jvp);
  }
  scores.write(a);
  OutputView(p, a.grad_by_head[kSinks], Type::f64, b, h).set(0, 0, sink);
}

}  // namespace

void attention_double_backward(const Problem& p, const BackwardArgs& a) {
  for (int64_t b = 0; b < p.batch(); ++b) {
    for (int64_t hk = 0; hk < p.kv_heads; ++hk) {
      KeySums keys(p);
      for (int64_t h = hk * p.group(); h < (hk + 1) * p.group(); ++h) double_head(p, a, b, h, keys);
      keys.write(a, b, hk);
    }
  }
}

}  // namespace qkv::reference
