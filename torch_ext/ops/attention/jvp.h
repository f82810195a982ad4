// attention_forward and its derivative in a direction, for forward mode.
#pragma once

#include "call/call.h"

namespace qkv::ops {

Tensors attention_jvp_cpu(const Call& call);
Tensors attention_jvp_meta(const Call& call);

}  // namespace qkv::ops
