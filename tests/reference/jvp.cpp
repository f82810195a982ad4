// Forward-mode derivatives: each line is one of the formulas of attention_jvp.h.
#include <cmath>
#include <vector>

#include "reference/directions.h"
#include "reference/reference.h"

namespace qkv::reference {
namespace {

// What the rows of one head have, computed in time S * (D + Dv) a row.
struct JvpRow {
  double lse, lse_jvp = 0;
  std::vector<double> output, output_jvp;

  JvpRow(const Head& head, const Directions& along, int64_t i)
      : output(head.p.head_dim_v), output_jvp(head.p.head_dim_v) {
    const int64_t S = head.p.seqlen_k, Dv = head.p.head_dim_v;
    double max = head.sink();
    std::vector<double> scores(S, -kInf);
    for (int64_t j = 0; j < S; ++j) {
      if (head.attends(i, j)) scores[j] = head.score(i, j);
      if (scores[j] != -kInf && !(scores[j] <= max)) max = scores[j];
    }
    const auto share = [&](double score) { return score == -kInf ? 0 : std::exp(score - max); };
    double sum = head.share_of_sink(i, max);
    if (along.sinks && sum > 0) lse_jvp = sum * along.sinks(0, 0);
    for (int64_t j = 0; j < S; ++j) {
      if (!head.attends(i, j)) continue;
      const double weight = share(scores[j]), score_jvp = along.score(i, j);
      const double kept = head.keep(i, j) * weight;
      sum += weight;
      lse_jvp += weight * score_jvp;
      for (int64_t d = 0; d < Dv; ++d) {
        const double value = head.value(j, d), value_jvp = along.value ? along.value(j, d) : 0;
        output[d] += kept * value;
        output_jvp[d] += kept * (value_jvp + score_jvp * value);
      }
    }
    lse = max + std::log(sum);  // the sink if there was nothing to attend to
    if (sum == 0) return;
    lse_jvp /= sum;
    for (int64_t d = 0; d < Dv; ++d) {
      output[d] /= sum;
      output_jvp[d] = output_jvp[d] / sum - lse_jvp * output[d];
    }
  }
};

void jvp_head(const Problem& p, const JvpArgs& a, const JvpResult& result, int64_t b, int64_t h) {
  const Head head(p, b, h);
  const Directions along(head, a);
  const Type element = type_of(p.dtype), compute = type_of(compute_type(p.dtype));
  const OutputView output(p, result.output, element, b, h), lse(p, result.lse, compute, b, h);
  const OutputView output_jvp(p, result.output_jvp, element, b, h);
  const OutputView lse_jvp(p, result.lse_jvp, compute, b, h);
  for (int64_t i = 0; i < p.seqlen_q; ++i) {
    const JvpRow row(head, along, i);
    lse.set(i, 0, row.lse);
    lse_jvp.set(i, 0, row.lse_jvp);
    for (int64_t d = 0; d < p.head_dim_v; ++d) {
      output.set(i, d, row.output[d]);
      output_jvp.set(i, d, row.output_jvp[d]);
    }
  }
}

}  // namespace

void attention_jvp(const Problem& p, const JvpArgs& args, const JvpResult& result) {
  for (int64_t b = 0; b < p.batch(); ++b)
    for (int64_t h = 0; h < p.heads; ++h) jvp_head(p, args, result, b, h);
}

}  // namespace qkv::reference
