// The users' operators, made of low-level ones. Only what depends on the arguments' types,
// devices and options is decided here, so that torch.compile sees through them.
#pragma once

#include "ops.h"

namespace qkv::composite {

// `call` without dropout_seed; each draws one if it needs one.
at::Tensor attention(const Forward& call);
OutputAndLse attention_with_lse(const Forward& call);

}  // namespace qkv::composite
