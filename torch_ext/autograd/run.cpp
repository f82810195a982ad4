#include "autograd/run.h"

#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <new>
#include <sstream>

#include "autograd/differentiate.h"
#include "call/after_fork.h"
#include "call/autocast.h"
#include "call/boxed.h"
#include "tensors/copies.h"

namespace qkv {
namespace {

// Whether the dispatcher would do no more than run the Autograd kernel and the CPU kernel. It does
// more where a call is not plain, and for the profiler.
bool is_direct(const Call& call) {
  return !call.op->writes && is_plain(call) &&
         !at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
}

Tensors run_directly(const Call& call) {
  if (call.op->kernels.composite) return call.op->kernels.composite(call);
  const OneThreadAfterFork one_thread;
  // Where the dispatcher leaves Autograd kernels out: in inference mode, and within operators.
  if (c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality))
    return run_cpu(call);
  return autograd::differentiate(call, [&](bool has_node) {
    if (!has_node || call.wants_lse) return run_cpu(call);
    Call whole = call;
    whole.wants_lse = true;
    return run_cpu(whole);
  });
}

}  // namespace

bool is_plain(c10::DispatchKeySet keys) {
  // BackendSelect has no kernel for our operators, ADInplaceOrView only for those that write to
  // their arguments.
  using c10::DispatchKey;
  static const uint64_t known =
      c10::DispatchKeySet({DispatchKey::CPU, DispatchKey::AutogradCPU, DispatchKey::BackendSelect,
                           DispatchKey::ADInplaceOrView})
          .raw_repr();
  const auto local = c10::impl::tls_local_dispatch_key_set();
  return (((keys | local.included_) - local.excluded_).raw_repr() & ~known) == 0;
}

bool is_plain(const Call& call) {
  c10::DispatchKeySet keys;
  call.op->for_each_tensor([&](Argument argument) {
    if (call.has(argument)) keys = keys | call[argument].key_set();
  });
  return is_plain(keys);
}

bool are_constant(std::initializer_list<std::reference_wrapper<const at::Tensor>> tensors) {
  c10::DispatchKeySet keys;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    if (tensor._fw_grad(0).defined()) return false;
    keys = keys | tensor.key_set();
  }
  return !at::GradMode::is_enabled() && is_plain(keys);
}

Tensors run_cpu(const Call& call) {
  // What is written to is not copied: such an operator copies the others itself.
  if (!call.op->writes && !is_aligned(call)) return run_cpu(*CopiedCall(call, aligned));
  try {
    return call.op->kernels.cpu(call);
  } catch (const std::bad_alloc&) {
    std::ostringstream sizes;
    call.op->for_each_tensor([&](Argument argument) {
      if (call.has(argument))
        sizes << ", " << call.name_of(argument) << " is " << call[argument].sizes();
    });
    TORCH_CHECK(false, call.title(), ": there is no memory for the workspace", sizes.str());
  }
}

Tensors run(const Call& call) {
  if (is_direct(call)) return run_directly(call);
  boxed::Stack stack;
  boxed::push(stack, call);
  call.op->handle().callBoxed(stack);
  return boxed::pop_results(*call.op, stack);
}

Tensors run_cast(Call&& call, std::initializer_list<Argument> arguments) {
  const Autocast autocast(call, arguments);
  return run(call);
}

}  // namespace qkv
