// Attention in plain loops and double accumulation: what every kernel is held against.
// Tests link it; the library knows nothing of it.
//
// Indices: b flat batch index, h query head, hk key/value head, i query, j key.
#pragma once

#include "attention.h"

namespace qkv::reference {

// As in attention.h, on one thread.
void attention_forward(const Problem& problem, const ForwardResult& result);
void attention_backward(const Problem& problem, const BackwardArgs& args);
void attention_weights_dot(const Problem& problem, const BackwardArgs& args, const Output& dot);
void attention_hard(const Problem& problem, const HardResult& result);

// Whether query i of head h may see key j: neither is_causal, nor the window, nor
// the mask hides it.
bool attends(const Problem& problem, int64_t b, int64_t h, int64_t i, int64_t j);

// args.weights[b, h, :, :] += the weights. Time L * S * D.
void add_weights(const Problem& problem, const BackwardArgs& args, int64_t b, int64_t h);

}  // namespace qkv::reference
