#include "autograd/define.h"

#include "autograd/differentiate.h"
#include "autograd/run.h"
#include "call/boxed.h"
#include "call/check.h"
#include "tensors/layout.h"

namespace qkv {
namespace {

// Dispatch key CompositeExplicitAutograd, backends without a kernel, and nested tensors, which have
// keys of their own: an error, clearer than the dispatcher's. The first check that fails says why;
// if none does, it is a kind of tensor that has no kernel.
Tensors refuse(const Call& call) {
  check_tensors(call);
  check_supported(call);
  TORCH_CHECK_NOT_IMPLEMENTED(false, call.title(), ": query is not a plain dense CPU tensor");
}

}  // namespace

void DefinedOperator::define() {
  using c10::DispatchKey;
  library_.def(schema.c_str(), {at::Tag::pt2_compliant_tag});
  handle_ = c10::Dispatcher::singleton().findSchemaOrThrow(("qkv::" + name).c_str(), "");
  const auto implement = [&](DispatchKey key, auto body) {
    if (body) library_.impl(name.c_str(), torch::dispatch(key, boxed::kernel(*this, body)));
  };
  implement(DispatchKey::AutocastCPU, kernels.composite ? kernels.composite : kernels.autocast);
  implement(DispatchKey::CompositeImplicitAutograd, kernels.composite);
  if (kernels.composite) return;
  implement(DispatchKey::CPU, &run_cpu);
  implement(DispatchKey::Meta, kernels.meta ? kernels.meta : &empty_results_meta);
  implement(DispatchKey::Autograd, &autograd::kernel);
  for (const DispatchKey key : kRefusedKeys) implement(key, &refuse);
}

}  // namespace qkv
