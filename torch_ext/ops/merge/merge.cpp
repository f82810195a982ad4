// qkv::merge: attention over parts of the keys, put together. Made of torch's operators, each of
// which brings its derivatives along.
#include "qkv/merge.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <limits>

#include "call/after_fork.h"
#include "call/fixed_bits.h"
#include "call/unknown_sizes.h"

namespace qkv {
namespace {

void check_dtypes(const char* name, at::TensorList all) {
  for (size_t part = 0; part < all.size(); ++part) {
    TORCH_CHECK(all[part].defined(), "merge: ", name, "[", part, "] is an undefined tensor");
    TORCH_CHECK(all[part].is_floating_point() && all[part].scalar_type() == all[0].scalar_type(),
                "merge: ", name, "[", part, "] is ", all[part].scalar_type(),
                ", but one floating dtype is expected, the same for all parts; ", name, "[0] is ",
                all[0].scalar_type());
  }
}

void check(at::TensorList outputs, at::TensorList lses) {
  TORCH_CHECK(!outputs.empty(), "merge: outputs is empty; at least one part is expected");
  TORCH_CHECK(outputs.size() == lses.size(), "merge: lses has ", lses.size(), " tensors, but ",
              outputs.size(), " are expected, one for each of outputs");
  check_dtypes("outputs", outputs);
  check_dtypes("lses", lses);
  for (size_t part = 0; part < outputs.size(); ++part) {
    const auto output = outputs[part].sym_sizes(), lse = lses[part].sym_sizes();
    const auto first = outputs[0].sym_sizes();
    TORCH_CHECK(
        !output.empty() && are_equal(output, first), "merge: outputs[", part, "] is ", output,
        ", but one shape [..., L, Dv] is expected, the same for all parts; outputs[0] is ", first);
    const auto rows = first.slice(0, first.size() - 1);
    TORCH_CHECK(are_equal(lse, rows), "merge: lses[", part, "] is ", lse, ", but ", rows,
                " is expected, a number for each row of outputs");
  }
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> merge(at::TensorList outputs, at::TensorList lses) {
  const OneThreadAfterFork one_thread;
  refuse_where_reproducible("merge", "a merge of parts");
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
