#include <vector>

#include "reference/backward_head.h"
#include "reference/reference.h"
#include "reference/sums.h"

namespace qkv::reference {
namespace {

// Writes the gradients of head h, in time L * S * (D + Dv), and adds those of its keys to `keys`.
void backward_head(const Problem& p, const BackwardArgs& a, int64_t b, int64_t h, KeySums& keys) {
  const BackwardHead head(p, a, b, h);
  const OutputView grad_query(p, a.grad_query, type_of(p.dtype), b, h);
  ScoreSums scores(head, a);
  double sink = 0;
  for (int64_t i = 0; i < p.seqlen_q; ++i) {
    const double delta = head.delta(i);
    std::vector<double> query(p.head_dim);
    for (int64_t j = 0; j < p.seqlen_k; ++j) {
      if (!head.attends(i, j)) continue;
      const double softmax = head.softmax(i, j), grad = head.grad_score(i, j, softmax, delta);
      // score_ij depends on query_i and key_j through dot_ij = sum_d query_id * key_jd.
      const double grad_dot = grad * head.grad_dot(i, j);
      for (int64_t d = 0; d < p.head_dim; ++d) query[d] += grad_dot * head.key(j, d);
      keys.add_to_key(j, grad_dot, head.query, i);
      // output_id = sum_j weight_ij * value_jd
      keys.add_to_value(j, head.keep(i, j) * softmax, head.grad_output, i);
      scores.add(i, j, grad);
    }
    for (int64_t d = 0; d < p.head_dim; ++d) grad_query.set(i, d, query[d]);
    scores.end_row(i);
    // lse_i = log(exp(sink) + sum_j exp(score_ij))
    if (head.lse(i, 0) != -kInf) sink -= head.softmax_of_sink(i) * head.delta_of_sink(i);
  }
  scores.write(a);
  OutputView(p, a.grad_by_head[kSinks], Type::f64, b, h).set(0, 0, sink);
}

}  // namespace

void attention_backward(const Problem& p, const BackwardArgs& args) {
  BackwardArgs a = args;
  const std::vector<double> row_sums = add_row_sums(p, a);
  if (a.direction) return attention_double_backward(p, a);
  for (int64_t b = 0; b < p.batch(); ++b) {
    for (int64_t hk = 0; hk < p.kv_heads; ++hk) {
      KeySums keys(p);
      for (int64_t h = hk * p.group(); h < (hk + 1) * p.group(); ++h)
        backward_head(p, a, b, h, keys);
      keys.write(a, b, hk);
    }
  }
}

}  // namespace qkv::reference
