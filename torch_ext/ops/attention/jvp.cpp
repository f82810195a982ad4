#include "ops/attention/jvp.h"

#include <c10/core/SymInt.h>

#include "attention_jvp.h"
#include "tensors/copies.h"
#include "tensors/layout.h"
#include "tensors/problem.h"

namespace qkv::ops {
namespace {

// A tangent has the shape and the dtype of what it is the tangent of.
template <class T>
void check_tangents(const Call& call) {
  for (int i = 0; i < arg::kDifferentiable; ++i) {
    const auto argument = Argument(i);
    if (!call.has(tangent_of(argument))) continue;
    const at::Tensor& tangent = call[tangent_of(argument)];
    const char* name_of = call.name_of(tangent_of(argument));
    TORCH_CHECK(call.has(argument), call.op->name, ": ", name_of, " is given, but ",
                call.name_of(argument), " is None");
    TORCH_CHECK(sizes_of<T>(tangent) == sizes_of<T>(call[argument]), call.op->name, ": ", name_of,
                " has the shape ", sizes_of<T>(tangent), ", but that of ", call.name_of(argument),
                ", ", sizes_of<T>(call[argument]), ", is expected");
    TORCH_CHECK(tangent.scalar_type() == call[argument].scalar_type() &&
                    at::isFloatingType(tangent.scalar_type()),
                call.op->name, ": ", name_of, " is ", name(tangent.scalar_type()), ", and ",
                call.name_of(argument), " is ", name(call[argument].scalar_type()),
                ", but the same floating dtype is expected");
  }
}

template <class T>
Tensors empty_results_and_tangents(const Call& call, const Sizes<T>& sizes) {
  Tensors results = empty_results(call, sizes);
  for (at::Tensor& tangent : empty_results(call, sizes)) results.push_back(std::move(tangent));
  return results;
}

}  // namespace

Tensors attention_jvp_meta(const Call& call) {
  const auto sizes = check<c10::SymInt>(call);
  check_tangents<c10::SymInt>(call);
  return empty_results_and_tangents(call, sizes);
}

Tensors attention_jvp_cpu(const Call& call) {
  const auto sizes = check<int64_t>(call);
  check_tangents<int64_t>(call);
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
  if (has_queries(kernel.problem)) qkv::attention_jvp(kernel.problem, args, result);
  return results;
}

}  // namespace qkv::ops
