// torch.autocast("cpu"), for the users' operators.
#pragma once

#include <ATen/autocast_mode.h>

#include "after_fork.h"
#include "call.h"

namespace qkv {

// `call` as autocast has it, as long as this lives, during which nothing else is cast: query, key,
// value and a floating attn_mask in autocast's dtype, as for torch's own attention. Where query
// keeps its dtype (float64, another device, no autocast) so does everything; alibi_slopes and
// sinks always do. The casts do not hang after fork().
class Autocast {
 public:
  explicit Autocast(const Forward& call) : call_(call) {
    if (!enabled_ || !at::autocast::is_eligible(call.query(), at::kCPU)) return;
    const at::ScalarType dtype = at::autocast::get_autocast_dtype(at::kCPU);
    for (int i = 0; i <= kAttnMask; ++i) {
      tensors_[i] = at::autocast::cached_cast(dtype, *call.tensors[i], at::kCPU);
      call_.tensors[i] = &tensors_[i];
    }
  }
  Autocast(const Autocast&) = delete;
  const Forward& operator*() const { return call_; }

 private:
  const OneThreadAfterFork one_thread_;
  const bool enabled_ = at::autocast::is_autocast_enabled(at::kCPU);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::DispatchKey::AutocastCPU};
  std::array<at::Tensor, kAttnMask + 1> tensors_;
  Forward call_;
};

}  // namespace qkv
