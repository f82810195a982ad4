#include "autograd/tangents.h"

namespace qkv::autograd {
namespace {

constexpr uint64_t kLevel = 0;  // torch has one; nested ones are torch.func's, a call for each

// Where a call has the tangent of an argument; `count`: it depends on none.
Argument tangent_slot(Argument argument) {
  if (argument < arg::kDifferentiable) return tangent_of(argument);
  switch (argument) {
    case arg::output:
      return arg::output_tangent;
    case arg::logsumexp:
      return arg::logsumexp_tangent;
    case arg::grad_output:
      return arg::grad_output_tangent;
    case arg::grad_logsumexp:
      return arg::grad_logsumexp_tangent;
    default:
      return arg::count;
  }
}

}  // namespace

Tensors run_jvp(const Call& call) {
  Call with_tangents = call;
  with_tangents.wants_lse = true;
  std::array<at::Tensor, arg::count> primals, tangents;
  for (const Parameter& p : call.op->parameters) {
    const auto argument = Argument(p.which);
    if (!p.is_tensor || !call.has(argument)) continue;
    const at::Tensor& tangent = tangents[argument] = call[argument]._fw_grad(kLevel);
    if (!tangent.defined()) continue;
    with_tangents.set(argument, primals[argument] = call[argument]._fw_primal(kLevel));
    const Argument slot = tangent_slot(argument);
    if (slot != arg::count && !tangent._is_zerotensor()) with_tangents.set(slot, tangent);
  }
  return call.op->kernels.jvp(with_tangents);
}

void set_tangents(Tensors& results, const Tensors& jvp) {
  for (size_t i = 0; i < results.size(); ++i)
    if (results[i].defined() && jvp[results.size() + i].defined())
      results[i]._set_fw_grad(jvp[results.size() + i], kLevel, /*is_inplace_op=*/false);
}

}  // namespace qkv::autograd
