// Runs attention_backward with a direction (attention_jvp.h).
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "attention_jvp.h"
#include "jvp_workload.h"

namespace qkv::test {

// What both passes before it have left for the pass for second derivatives.
struct FirstPasses {
  std::vector<double> output, output_jvp;
};

// The gradients' changes along the directions of `w`, and the output, by the library or the
// reference. With `first`, those numbers are read in place of what the passes before have left.
inline Results run_double(const JvpWorkload& w, const Library& library = kKernels,
                          Jvp jvp = attention_jvp, FirstPasses* left = nullptr,
                          const FirstPasses* first = nullptr) {
  JvpWorkload& inputs = const_cast<JvpWorkload&>(w);
  for (const Tensor* t : inputs.inputs()) t->make_read_only();
  for (const Tensor* t : inputs.directions()) t->make_read_only();
  Outputs outputs(w);
  const Tensor output_jvp = w.make_output(type_of(w.c.dtype), w.c.heads(), w.c.L, w.c.Dv);
  const Tensor lse_jvp = w.make_output(w.compute_element(), w.c.heads(), w.c.L, 1);
  library.forward(w.problem(), outputs.forward_result(true));
  jvp(w.problem(), w.args(), {{}, {}, output_jvp.output(), lse_jvp.output()});
  if (left) *left = {outputs.values().output, output_jvp.values()};
  if (first) {
    outputs.set_output(first->output);
    size_t n = 0;
    const_cast<Tensor&>(output_jvp).fill([&] { return first->output_jvp[n++]; });
  }
  outputs.forward_is_done();
  output_jvp.make_read_only(), lse_jvp.make_read_only();
  const BackwardDirection direction{w.args(), output_jvp.input(), lse_jvp.input()};
  BackwardArgs args = outputs.backward_args();
  args.direction = &direction;
  library.backward(w.problem(), args);
  outputs.expect_nothing_else_written();
  return outputs.values();
}

// What run_double() should give. In half precision the passes before round what they leave, and the
// reference is given the same.
inline Results double_truth(const JvpWorkload& w, const FirstPasses& left) {
  return run_double(w.in_f64(), kReference, reference::attention_jvp, nullptr,
                    w.c.dtype == DType::bf16 || w.c.dtype == DType::f16 ? &left : nullptr);
}

}  // namespace qkv::test
