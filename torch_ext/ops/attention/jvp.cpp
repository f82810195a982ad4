#include "ops/attention/jvp.h"

#include <c10/core/SymInt.h>

#include "attention_jvp.h"
#include "tensors/copies.h"
#include "tensors/documents.h"
#include "tensors/layout.h"
#include "tensors/problem.h"

namespace qkv::ops {
namespace {

template <class T>
Tensors empty_results_and_tangents(const Call& call, const Sizes<T>& sizes) {
  Tensors results = empty_results(call, sizes);
  for (at::Tensor& tangent : empty_results(call, sizes)) results.push_back(std::move(tangent));
  return results;
}

}  // namespace

Tensors attention_jvp_meta(const Call& call) {
  const auto sizes = check<c10::SymInt>(call);
  return empty_results_and_tangents(call, sizes);
}

Tensors attention_jvp_cpu(const Call& call) {
  const auto sizes = check<int64_t>(call);
  if (!is_aligned(call)) return attention_jvp_cpu(*CopiedCall(call, aligned));
  Tensors results = empty_results_and_tangents(call, sizes);
  KernelCall kernel(call, sizes);
  JvpArgs args;
  kernel.bind_tangents(args);
  JvpResult result;
  kernel.bind(result.output, results[0], Dims::head_row_column);
  kernel.bind(result.lse, results[1], Dims::head_row);
  kernel.bind(result.output_jvp, results[2], Dims::head_row_column);
  kernel.bind(result.lse_jvp, results[3], Dims::head_row);
  kernel.set_strides();
  run_on_rows(call, sizes, kernel.problem, results,
              [&](const Problem& p) { qkv::attention_jvp(p, args, result); });
  return results;
}

}  // namespace qkv::ops
