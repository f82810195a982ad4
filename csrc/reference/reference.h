// Attention in plain loops and double accumulation: what every kernel is held
// against, and what the drivers call for the few rows where a NaN or infinity
// in something masked would otherwise leak through 0 * NaN.
//
// b, h, hk: flat batch index, query head, key/value head. i, j: query, key.
#pragma once

#include "attention.h"

namespace qkv::reference {

void attention_forward(const Problem& problem, const ForwardResult& result);
void attention_backward(const Problem& problem, const BackwardArgs& args);

// The same, one row at a time. O(S * (D + Dv)).
void output_row(const Problem& problem, const ForwardResult& result, int64_t b, int64_t h,
                int64_t i);
void grad_query_row(const Problem& problem, const BackwardArgs& args, int64_t b, int64_t h,
                    int64_t i);
// O(H / Hkv * L * (D + Dv)).
void grad_key_value_row(const Problem& problem, const BackwardArgs& args, int64_t b, int64_t hk,
                        int64_t j);

}  // namespace qkv::reference
