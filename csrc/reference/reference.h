// Attention in plain loops and double accumulation: what every kernel is held
// against, and what the drivers call for the few rows where a NaN or infinity
// in something masked would otherwise leak through 0 * NaN.
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

// A part at a time. Outputs with null data are left alone; none of the rows
// allocates memory.

// output[b, h, i, :] and lse[b, h, i]. Time S * (D + Dv).
void output_row(const Problem& problem, const ForwardResult& result, int64_t b, int64_t h,
                int64_t i);

// grad_query[b, h, i, :]. Time S * (D + Dv).
void grad_query_row(const Problem& problem, const BackwardArgs& args, int64_t b, int64_t h,
                    int64_t i);

// grad_key[b, hk, j, :] and grad_value[b, hk, j, :]. Time H / Hkv * L * (D + Dv).
void grad_key_value_row(const Problem& problem, const BackwardArgs& args, int64_t b, int64_t hk,
                        int64_t j);

// args.weights[b, h, :, :] += the weights. Time L * S * D.
void add_weights(const Problem& problem, const BackwardArgs& args, int64_t b, int64_t h);

// dot[b, h, i] = sum_j weight_ij * args.grad_weights_ij. Time S * D.
void weights_dot_row(const Problem& problem, const BackwardArgs& args, const Output& dot, int64_t b,
                     int64_t h, int64_t i);

}  // namespace qkv::reference
