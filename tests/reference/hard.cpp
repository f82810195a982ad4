// Hard attention: a query gets the value of its best key, and not an average.
#include <cmath>

#include "reference/head.h"
#include "reference/reference.h"

namespace qkv::reference {
namespace {

// The number of the first key that has the largest score of query i, where NaN is larger than any
// number. It is -1 if the query sees no key, or every score is -inf.
int64_t best_key(const Head& head, int64_t i) {
  int64_t best = -1;
  double largest = -kInf;
  for (int64_t j = 0; j < head.p.seqlen_k && !std::isnan(largest); ++j) {
    if (!head.attends(i, j)) continue;
    const double score = head.score(i, j);
    if (score > largest || std::isnan(score)) largest = score, best = j;
  }
  return best;
}

}  // namespace

void attention_hard(const Problem& p, const HardResult& result) {
  for (int64_t b = 0; b < p.batch(); ++b) {
    for (int64_t h = 0; h < p.heads; ++h) {
      const Head head(p, b, h);
      const OutputView output(p, result.output, type_of(p.dtype), b, h);
      const OutputView index(p, result.index, Type::int64, b, h);
      for (int64_t i = 0; i < p.seqlen_q; ++i) {
        const int64_t j = best_key(head, i);
        index.set(i, 0, double(j));
        for (int64_t d = 0; d < p.head_dim_v; ++d) output.set(i, d, j < 0 ? 0 : head.value(j, d));
      }
    }
  }
}

}  // namespace qkv::reference
