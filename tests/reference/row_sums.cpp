// What the weights of the rows in common/row_sums.h add up to.
#include "common/row_sums.h"

#include "reference/backward_head.h"

namespace qkv::reference {
namespace {

// This is qkv::are_whole() of an lse that kernels have rounded to the type that they compute in.
bool are_whole(const Problem& p, double sum, double lse) {
  return compute_type(p.dtype) == DType::f64 ? qkv::are_whole(sum, lse)
                                             : qkv::are_whole(sum, float(lse));
}

// Writes the two numbers of row i, in time S * (D + Dv).
void row_sums(const BackwardHead& head, const BackwardArgs& a, int64_t i, const OutputView& to) {
  if (!sums_row(head.p, a, head.lse(i, 0))) return to.set(i, 0, head.dot(i)), to.set(i, 1, 1);
  double sum = 0, weights = 0;
  for (int64_t j = 0; j < head.p.seqlen_k; ++j) {
    if (!head.attends(i, j)) continue;
    const double softmax = head.softmax(i, j);
    weights += softmax;
    sum += head.keep(i, j) * softmax * head.grad_weight(i, j);
  }
  const double all = weights + head.softmax_of_sink(i);
  const bool divides =
      weights != 0 && (a.grad_weights.data || are_whole(head.p, all, head.lse(i, 0)));
  // In a row that sees nothing, nothing reaches the weights, not even 0 * inf by way of the output.
  if (!divides) return to.set(i, 0, a.grad_weights.data ? sum : head.dot(i)), to.set(i, 1, 1);
  to.set(i, 0, a.grad_weights.data || std::isfinite(head.dot(i)) ? sum / all : head.dot(i));
  to.set(i, 1, all);
}

}  // namespace

std::vector<double> add_row_sums(const Problem& p, BackwardArgs& args) {
  Output to;
  std::vector<double> memory(lay_out_row_sums(p, to.strides));
  to.data = memory.data();
  for (int64_t b = 0; b < p.batch(); ++b) {
    for (int64_t h = 0; h < p.heads; ++h) {
      const BackwardHead head(p, args, b, h);
      const OutputView view(p, to, Type::f64, b, h);
      for (int64_t i = 0; i < p.seqlen_q; ++i) row_sums(head, args, i, view);
    }
  }
  args.row_sums = {memory.data(), to.strides};
  return memory;
}

}  // namespace qkv::reference
