#include "autograd/tangents.h"

#include "call/run.h"

namespace qkv::autograd {
namespace {

constexpr uint64_t kLevel = 0;  // torch has one; nested ones are torch.func's, a call for each

}  // namespace

Tensors run_jvp(const Call& call) {
  const Operator& op = *call.op->jvp;
  Call with_tangents = call.as(op);
  with_tangents.wants_lse = true;
  std::array<at::Tensor, arg::count> primals, tangents;
  for (const Parameter& p : call.op->parameters) {
    const auto argument = Argument(p.which);
    if (!p.is_tensor || !call.has(argument)) continue;
    const at::Tensor& tangent = tangents[argument] = call[argument]._fw_grad(kLevel);
    if (!tangent.defined()) continue;
    with_tangents.set(argument, primals[argument] = call[argument]._fw_primal(kLevel));
    if (argument < arg::kDifferentiable && !tangent._is_zerotensor())
      with_tangents.set(tangent_of(argument), tangent);
  }
  return run(with_tangents);
}

void set_tangents(Tensors& results, const Tensors& jvp) {
  for (size_t i = 0; i < results.size(); ++i)
    results[i]._set_fw_grad(jvp[results.size() + i], kLevel, /*is_inplace_op=*/false);
}

}  // namespace qkv::autograd
