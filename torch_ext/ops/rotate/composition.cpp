// A rotation out of torch's operators, for derivatives beyond the first.
#include <ATen/ATen.h>

#include "ops/rotate/rotate.h"

namespace qkv::ops {
namespace {

at::Tensor normalised(const at::Tensor& x, const at::Tensor& weight, double eps) {
  if (!weight.defined()) return x;
  const at::Tensor norm = (x * x).mean(-1, /*keepdim=*/true).add(eps).rsqrt();
  return x * norm * weight.to(x.scalar_type()).unsqueeze(-2).unsqueeze(-2);
}

at::Tensor rotated(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                   bool interleaved) {
  const c10::SymInt pairs = cos.sym_size(-1);
  const at::Tensor first = x.slice_symint(-1, 0, 2 * pairs);
  const auto of_pairs = [&](int64_t which) {
    if (interleaved) return first.slice_symint(-1, which, 2 * pairs, 2);
    return first.slice_symint(-1, which * pairs, (which + 1) * pairs);
  };
  const at::Tensor a = of_pairs(0), b = of_pairs(1);
  const at::Tensor left = a * cos - b * sin, right = b * cos + a * sin;
  const at::Tensor turned =
      interleaved ? at::stack({left, right}, -1).flatten(-2) : at::cat({left, right}, -1);
  return at::cat({turned, x.slice_symint(-1, 2 * pairs)}, -1);
}

}  // namespace

Tensors rotate_composition(const Call& call) {
  const at::ScalarType dtype = call[arg::query].scalar_type(), wide = compute_type(dtype);
  const at::Tensor cos = call[arg::cos].to(wide).unsqueeze(-3);
  const at::Tensor sin = call[arg::sin].to(wide).unsqueeze(-3);
  Tensors results;
  for (const auto& [tensor, weight] :
       {std::pair(arg::query, arg::query_norm), std::pair(arg::key, arg::key_norm)}) {
    const at::Tensor x = normalised(call[tensor].to(wide), call[weight], call.options.eps);
    results.push_back(rotated(x, cos, sin, call.options.interleaved).to(dtype));
  }
  return results;
}

}  // namespace qkv::ops
