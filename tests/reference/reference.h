// Attention in plain loops, with every sum in double: this is what every kernel is held against.
// The tests link it, and the library knows nothing of it. For speed there is nothing here, but that
// a pass computes each score once.
//
// Indices everywhere in this folder: b is the flat index of the batch item, h the query head, hk
// the key/value head, i the query and j the key.
#pragma once

#include "attention.h"
#include "attention_jvp.h"
#include "rotation.h"

namespace qkv::reference {

// These compute what their namesakes in attention.h do, on one thread.
void attention_forward(const Problem& problem, const ForwardResult& result);
void attention_backward(const Problem& problem, const BackwardArgs& args);
// What attention_backward does with BackwardArgs::direction.
void attention_double_backward(const Problem& problem, const BackwardArgs& args);
void attention_jvp(const Problem& problem, const JvpArgs& args, const JvpResult& result);
void attention_hard(const Problem& problem, const HardResult& result);
// These compute what their namesakes in rotation.h do. Gradients that are sums are added up in
// their own type.
void rotation_forward(const Rotation& rotation);
void rotation_backward(const Rotation& rotation, const RotationGradients& gradients);

// Query i of head h may see key j: neither is_causal, nor the window, nor the mask hides it.
bool attends(const Problem& problem, int64_t b, int64_t h, int64_t i, int64_t j);

}  // namespace qkv::reference
