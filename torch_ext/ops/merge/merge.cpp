// qkv::merge: attention over parts of the keys, put together. Made of torch's operators, each of
// which brings its derivatives along.
#include "qkv/merge.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include <limits>

#include "call/after_fork.h"

namespace qkv {
namespace {

void check(at::TensorList outputs, at::TensorList lses) {
  TORCH_CHECK(!outputs.empty(), "merge: outputs is empty; at least one part is expected");
  TORCH_CHECK(outputs.size() == lses.size(), "merge: lses has ", lses.size(), " tensors, but ",
              outputs.size(), " are expected, one for each of outputs");
  for (size_t part = 0; part < outputs.size(); ++part) {
    const at::Tensor &output = outputs[part], &lse = lses[part], &first = outputs[0];
    TORCH_CHECK(output.defined(), "merge: outputs[", part, "] is an undefined tensor");
    TORCH_CHECK(lse.defined(), "merge: lses[", part, "] is an undefined tensor");
    TORCH_CHECK(output.is_floating_point() && output.scalar_type() == first.scalar_type(),
                "merge: outputs[", part, "] is ", output.scalar_type(),
                ", but one floating dtype is expected, the same for all parts; outputs[0] is ",
                first.scalar_type());
    TORCH_CHECK(lse.is_floating_point() && lse.scalar_type() == lses[0].scalar_type(),
                "merge: lses[", part, "] is ", lse.scalar_type(),
                ", but one floating dtype is expected, the same for all parts; lses[0] is ",
                lses[0].scalar_type());
    TORCH_CHECK(output.dim() > 0 && output.sym_sizes() == first.sym_sizes(), "merge: outputs[",
                part, "] is ", output.sym_sizes(),
                ", but one shape [..., L, Dv] is expected, the same for all parts; "
                "outputs[0] is ",
                first.sym_sizes());
    const auto rows = first.sym_sizes().slice(0, first.dim() - 1);
    TORCH_CHECK(lse.sym_sizes() == rows, "merge: lses[", part, "] is ", lse.sym_sizes(), ", but ",
                rows, " is expected, a number for each row of outputs");
  }
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> merge(at::TensorList outputs, at::TensorList lses) {
  const OneThreadAfterFork one_thread;
  check(outputs, lses);
  const double inf = std::numeric_limits<double>::infinity();
  const at::Tensor parts = at::stack(lses);
  // Weights relative to the largest of a row. Which number they are relative to cancels out, so it
  // takes no part in derivatives; 0 where there is nothing to attend to, so that -inf minus it is
  // -inf, and not NaN.
  const at::Tensor largest = parts.detach().amax(0);
  const at::Tensor base = largest.masked_fill(largest == -inf, 0);
  const at::Tensor weights = (parts - base).exp();
  const at::Tensor sum = weights.sum(0);
  const at::Tensor empty = sum == 0;
  const at::Tensor divisor = sum.masked_fill(empty, 1);

  const at::Tensor shares = (weights / divisor).unsqueeze(-1);
  at::Tensor output = shares[0] * outputs[0];
  for (size_t part = 1; part < outputs.size(); ++part)
    output = output + shares[int64_t(part)] * outputs[part];
  return {output.to(outputs[0].scalar_type()), (divisor.log() + base).masked_fill(empty, -inf)};
}

TORCH_LIBRARY_FRAGMENT(qkv, m) {
  // [..., H, L, Dv] and [..., H, L] of each part.
  m.def("merge(Tensor[] outputs, Tensor[] lses) -> (Tensor output, Tensor logsumexp)",
        {at::Tag::pt2_compliant_tag});
  m.impl("merge", torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(merge)));
}

}  // namespace qkv
