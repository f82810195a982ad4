// The dot products of the weights with the gradients that the caller has of them.
#include "reference/backward_head.h"
#include "reference/reference.h"

namespace qkv::reference {

namespace {

// Writes dot[b, h, i], both of its numbers, in time S * D.
void weights_dot_row(const Problem& p, BackwardArgs a, const Output& dot, int64_t b, int64_t h,
                     int64_t i) {
  a.grad_weights_dot = {};  // is still to be made
  const BackwardHead head(p, a, b, h);
  double sum = 0, weights = 0;
  for (int64_t j = 0; j < p.seqlen_k; ++j) {
    if (!head.attends(i, j)) continue;
    weights += head.softmax(i, j);
    sum += head.weight(i, j) * head.grad_weight(i, j);
  }
  const double all = weights == 0 ? 1 : weights + head.softmax_of_sink(i);
  const OutputView view(p, dot, type_of(compute_type(p.dtype)), b, h);
  view.set(i, 0, sum / all), view.set(i, 1, all);
}

}  // namespace

void attention_weights_dot(const Problem& p, const BackwardArgs& a, const Output& dot) {
  for (int64_t b = 0; b < p.batch(); ++b)
    for (int64_t h = 0; h < p.heads; ++h)
      for (int64_t i = 0; i < p.seqlen_q; ++i) weights_dot_row(p, a, dot, b, h, i);
}

}  // namespace qkv::reference
