// The users' operators, made of low-level ones. Only what depends on the arguments' types,
// devices and options is decided here, so that torch.compile sees through them.
#pragma once

#include "call.h"

namespace qkv::composite {

// `call` without dropout_seed; each draws one if it needs one.
at::Tensor attention(const Forward& call);
OutputAndLse attention_with_lse(const Forward& call);
OutputAndLse varlen_attention(const Forward& call, const at::Tensor& block_table);  // or None
at::Tensor attention_weights(const Weights& call);
OutputAndIndex hard_attention(const Hard& call);

}  // namespace qkv::composite
