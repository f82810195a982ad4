// qkv::attention, qkv::attention_with_lse and the operators they are made of.
#pragma once

#include "call/call.h"

namespace qkv::ops {

extern Operator attention_forward, attention_backward, attention_double_backward;
extern Operator attention_forward_jvp;

// Their CPU kernels, for other operators.
Tensors attention_forward_cpu(const Call& call);
Tensors attention_backward_cpu(const Call& call);

// Under autocast, with a seed if there is dropout: what the users' operators do, by the operator
// that computes it. For CPU and meta tensors.
Tensors attend(Call call, const Operator& op = attention_forward);

// On another device than the CPU: torch's own attention, or an error that says what it cannot do.
bool is_elsewhere(const Call& call);
Tensors attend_elsewhere(const Call& call);

// The rest is checked by the operators that follow.
void check_query(const Call& call);

}  // namespace qkv::ops
