#include <cmath>
#include <vector>

#include "reference/head.h"
#include "reference/reference.h"

namespace qkv::reference {
namespace {

// This is exp(score - max), and 0 where both are -inf.
double exp_below(double max, double score) { return score == -kInf ? 0 : std::exp(score - max); }

// A key that a query sees, and their score.
struct Seen {
  int64_t j;
  double score;
};

// Writes output[b, h, i, :] and lse[b, h, i], and adds to weights[b, h, i, :], in time S * (D +
// Dv).
void output_row(const Head& head, const ForwardResult& result, int64_t i) {
  const Problem& p = head.p;
  const Type compute = type_of(compute_type(p.dtype));
  const OutputView output(p, result.output, type_of(p.dtype), head.b, head.h);
  const OutputView lse(p, result.lse, compute, head.b, head.h);
  const OutputView weights(p, result.weights, compute, head.b, head.h);
  std::vector<Seen> seen;
  for (int64_t j = 0; j < p.seqlen_k; ++j)
    if (head.attends(i, j)) seen.push_back({j, head.score(i, j)});

  // sum = (exp(sink) + sum_j exp(score_j)) / exp(max), where max is the largest of sink and scores.
  double max = head.sink(), sum = head.share_of_sink(i, max);
  for (const auto [j, score] : seen) {
    if (score > max) sum *= exp_below(score, max), max = score;
    sum += exp_below(max, score);
  }

  // output_d = sum_j weight_j * value_jd,  weight_j = keep_j * exp(score_j) / sum. Of keys that are
  // not seen nothing is added: 0 times their value would be NaN, if that is not finite.
  std::vector<double> sums(p.head_dim_v);
  for (const auto [j, score] : seen) {
    const double weight = head.keep(i, j) * exp_below(max, score);
    for (int64_t d = 0; d < p.head_dim_v; ++d) sums[d] += weight * head.value(j, d);
    weights.add(i, j, result.weights_factor * (sum == 0 ? weight : weight / sum));
  }
  for (int64_t d = 0; d < p.head_dim_v; ++d) output.set(i, d, sum == 0 ? sums[d] : sums[d] / sum);

  // The lse is the sink, -inf without one, if there was nothing to attend to.
  lse.set(i, 0, max + std::log(sum));
}

}  // namespace

bool attends(const Problem& p, int64_t b, int64_t h, int64_t i, int64_t j) {
  return Head(p, b, h).attends(i, j);
}

void attention_forward(const Problem& p, const ForwardResult& result) {
  for (int64_t b = 0; b < p.batch(); ++b) {
    for (int64_t h = 0; h < p.heads; ++h) {
      const Head head(p, b, h);
      for (int64_t i = 0; i < p.seqlen_q; ++i) output_row(head, result, i);
    }
  }
}

}  // namespace qkv::reference
