// A forward operator by one pass of the kernel library.
#pragma once

#include "tensors/documents.h"
#include "tensors/layout.h"
#include "tensors/problem.h"

namespace qkv {

// The results of a call: run(problem) writes them to `outputs`, which are in the operator's order.
// `tangents`, unless it is null, gets the tangents that the call has.
template <class Run>
Tensors compute(const Call& call, std::initializer_list<Output*> outputs, JvpArgs* tangents,
                const Run& run) {
  const auto sizes = check<int64_t>(call);
  Tensors results = empty_results(call, sizes);
  KernelCall kernel(call, sizes);
  if (tangents) kernel.bind_tangents(*tangents);
  kernel.bind(outputs, results);
  kernel.set_strides();
  run_on_rows(call, sizes, kernel.problem, results, run);
  return results;
}

}  // namespace qkv
