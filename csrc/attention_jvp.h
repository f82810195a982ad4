// Forward-mode derivatives, a part of the public interface (attention.h): how output and
// log-sum-exp change when the inputs change along given directions. With ' for a direction, and
// for the change along it,
//
//   score'_ij = f'(softcap(..)) * softcap'(scale * dot(query_i, key_j))
//                 * scale * (dot(query'_i, key_j) + dot(query_i, key'_j))
//               + f_tables' - slope' * |i + S - L - j| + sum_m mask'_m,ij
//   lse'_i    = exp(sink - lse_i) * sink' + sum_j exp(score_ij - lse_i) * score'_ij
//   output'_i = sum_j weight_ij * (value'_j + score'_ij * value_j) - lse'_i * output_i
//
// where softcap' and f' are derivatives of softcap and of the score program f, and f_tables' is
// how f changes with its tables. All of it is one pass over the keys, in O(L) memory.
//
// And second derivatives: how the gradients of a backward pass change when the inputs change along
// given directions, grad_output and grad_lse staying as they are. That is the same as the gradient,
// with respect to the inputs, of
//
//   sum grad_output * output' + sum grad_lse * lse'
//
// so this is the second derivative of attention in reverse mode, too, the backward pass of
// attention_jvp, and forward mode of attention_backward. docs/report.md has the formulas.
#pragma once

#include "attention.h"

namespace qkv {

// The directions. Each has the shape of the tensor it belongs to, and null data stands for zeros.
struct JvpArgs {
  Input query, key, value;  // in the problem's dtype
  // Of floating masks; each may have another floating type than its mask. What a mask has at a
  // hidden pair is not used.
  std::array<Mask, kMasks> masks;
  std::array<Input, kHeadNumbers> by_head;  // [B..., H], double
  const void* tables = nullptr;  // of ScoreFunction::tables, with rows as far apart; null: zeros
  // ForwardResult::output, if the caller has it: then it is read instead of computed, which saves
  // one of six products, JvpResult::output must be null, and few rows have their scores made as the
  // forward pass made them (ScoreWay).
  Input output;
};

// Outputs with null data are not wanted.
struct JvpResult {
  Output output;      // [B..., H, L, Dv], as ForwardResult has it but for its last digits
  Output lse;         // [B..., H, L]
  Output output_jvp;  // [B..., H, L, Dv], in the problem's dtype
  Output lse_jvp;     // [B..., H, L], in the compute type
};

// A row with nothing to attend to gets output 0, lse -inf (the sink, if there is one) and
// derivatives of 0 (that of the sink). A direction of a hidden key or value reaches nothing, not
// even as NaN. Where a number that a row may see is not finite, the row's derivatives are not
// finite either. Keys in pages are not supported. Half precision is widened to f32 in every
// product. Bits and exceptions are as attention.h says.
QKV_CORE_API void attention_jvp(const Problem& problem, const JvpArgs& args,
                                const JvpResult& result);

// With BackwardArgs::direction, attention_backward makes these changes instead of the gradients. It
// takes O(L) memory, as without, and widens half precision to f32 in every product. A direction of
// a hidden key or value reaches nothing. There is no grad_weights.
struct BackwardDirection {
  JvpArgs along;  // its output is not used
  // JvpResult::output_jvp and lse_jvp, as attention_jvp left them for the same inputs.
  Input output_jvp, lse_jvp;
};

}  // namespace qkv
