// Boxed kernels: the dispatcher hands all of them the same, a stack of IValues, so that what lies
// between the dispatcher and a Call is written once for all operators.
#pragma once

#include <ATen/core/stack.h>

#include "call/call.h"

namespace qkv::boxed {

using torch::jit::Stack;

// The call whose arguments are the last of `stack`, to which it refers.
Call call_of(const Operator& op, const Stack& stack);

// Puts the arguments of `call` on the stack.
void push(Stack& stack, const Call& call);

// Takes the results of `op` off the stack.
Tensors pop_results(const Operator& op, Stack& stack);

// Replaces the arguments of `op` by its results.
void replace(const Operator& op, Stack& stack, Tensors&& results);

// The kernel that calls `body`, in which torch's operators do not hang after fork().
torch::CppFunction kernel(const Operator& op, Body body);

// The kernel that calls `body` with the means to redispatch.
using BodyWithKeys = void (*)(const Operator&, c10::DispatchKeySet, Stack&);
torch::CppFunction kernel(const Operator& op, BodyWithKeys body);

}  // namespace qkv::boxed
