#include "direct.h"

#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace qkv::direct {
namespace {

// The keys that the tensors have and those of this thread, less what this thread leaves out.
c10::DispatchKeySet keys_of(c10::ArrayRef<const at::Tensor*> tensors) {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  c10::DispatchKeySet keys = local.included_;
  for (const at::Tensor* tensor : tensors)
    if (tensor->defined()) keys = keys | tensor->key_set();
  return keys - local.excluded_;
}

}  // namespace

bool is_possible(c10::ArrayRef<const at::Tensor*> tensors) {
  // BackendSelect and ADInplaceOrView have no kernel for the operators that are called here.
  static const uint64_t known = (c10::DispatchKeySet(c10::DispatchKey::CPU) |
                                 c10::DispatchKeySet(c10::DispatchKey::AutogradCPU) |
                                 c10::DispatchKeySet(c10::DispatchKey::BackendSelect) |
                                 c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView))
                                    .raw_repr();
  return (keys_of(tensors).raw_repr() & ~known) == 0 &&
         !at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
}

}  // namespace qkv::direct
