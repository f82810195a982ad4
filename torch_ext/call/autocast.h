// torch.autocast("cpu"), for the users' operators.
#pragma once

#include <ATen/autocast_mode.h>

#include "call/after_fork.h"
#include "call/call.h"

namespace qkv {

// Casts `arguments` of `call`, if they are floating, and their tangents, as autocast has it. They
// live, and nothing else is cast, as long as this. torch does so for its own attention with query,
// key, value and attn_mask. Where query keeps its dtype (float64, another device, no autocast) so
// does everything; alibi_slopes and sinks always do. The casts do not hang after fork().
class Autocast {
 public:
  Autocast(Call& call, std::initializer_list<Argument> arguments) {
    if (!enabled_ || !at::autocast::is_eligible(call[arg::query], at::kCPU)) return;
    const at::ScalarType dtype = at::autocast::get_autocast_dtype(at::kCPU);
    tensors_.reserve(2 * arguments.size());  // the call points to its elements
    const auto cast = [&](Argument argument) {
      tensors_.push_back(at::autocast::cached_cast(dtype, call[argument], at::kCPU));
      call.set(argument, tensors_.back());
    };
    for (const Argument argument : arguments) {
      cast(argument);
      if (argument < arg::kDifferentiable && call.has(tangent_of(argument)))
        cast(tangent_of(argument));
    }
  }
  Autocast(const Autocast&) = delete;

 private:
  const OneThreadAfterFork one_thread_;
  const bool enabled_ = at::autocast::is_autocast_enabled(at::kCPU);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::DispatchKey::AutocastCPU};
  c10::SmallVector<at::Tensor, 8> tensors_;
};

// Whether a layer's mask of this dtype goes with a projected query of that one: Bool, Float and the
// query's own do, and a reduced one where autocast casts it.
inline bool is_mask_type(at::ScalarType mask, at::ScalarType query) {
  const bool is_cast = at::isReducedFloatingType(mask) && query != at::kDouble &&
                       at::autocast::is_autocast_enabled(at::kCPU);
  return mask == at::kBool || mask == at::kFloat || mask == query || is_cast;
}

}  // namespace qkv
