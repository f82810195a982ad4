// The public interface of the kernel library: no torch, no Python. The formula and the shapes are
// in problem.h, forward mode and second derivatives in attention_jvp.h.
#pragma once

#include "export.h"
#include "problem.h"

namespace qkv {

struct ForwardResult {
  Output output;  // [B..., H, L, Dv]
  // [B..., H, L] (col unused), in the compute type: the natural logarithm of the softmax's
  // denominator. Null data: not wanted.
  Output lse;
  // [B..., H, L, S], in the compute type: weights_factor times the weights, added to what is there.
  // The head stride may be 0: then those of all heads are added up, in ascending order. Null data:
  // not wanted.
  Output weights = {};
  double weights_factor = 1;
};

// The gradient of a floating mask: one of these, by what it broadcasts over. Null data: not wanted.
struct GradMask {
  // [B..., H, L, S], added to what is there. Batch and head strides may be 0: then the gradients of
  // all heads, or batch items, that share an element are added up, in ascending order.
  Output each;
  // Of a mask that broadcasts over queries, [B..., H, S] (row unused), summed over the queries; of
  // one that broadcasts over keys, [B..., H, L] (col unused), summed over the keys. With spans both
  // have the rows of keys and of queries.
  Output keys;
  Output queries;
};

struct BackwardDirection;  // attention_jvp.h

// Outputs with null data are not wanted. An output may have strides of 0 only where it says so.
// output, grad_output and the gradients of query, key and value are in `dtype`, all
// others in the compute type unless they say otherwise.
struct BackwardArgs {
  Input output;        // ForwardResult::output, as attention_forward left it
  Input lse;           // ForwardResult::lse, as attention_forward left it
  Input grad_output;   // null data stands for zeros
  Input grad_lse;      // null data stands for zeros
  Input grad_weights;  // [B..., H, L, S], the gradient of the weights themselves, or null
  // Made by attention_backward for some rows (common/row_sums.h), null from its callers. [B..., H,
  // L, 2]: of row i, sum_j weight_ij * (grad_weights_ij + dot(grad_output_i, value_j)), and what
  // exp(sink - lse_i) and all exp(score_ij - lse_i) add up to, by which weights are divided.
  Input row_sums;

  Output grad_query;
  Output grad_key;
  Output grad_value;
  std::array<GradMask, kMasks> grad_masks;
  std::array<Output, kHeadNumbers> grad_by_head;  // [B..., H], double
  // Compute type, [R, table_size()], rows as far apart as those of ScoreFunction::tables. Null: not
  // wanted.
  void* grad_tables = nullptr;

  // If not null, all gradients above are replaced by their changes in this direction.
  const BackwardDirection* direction = nullptr;
};

// Hard attention: the value of the best key instead of the average of all.
struct HardResult {
  // [B..., H, L, Dv]: the value of the key with the largest score, of the first if several have it.
  Output output;
  // [B..., H, L] (col unused), int64: the number of that key. Where a row has nothing to attend to,
  // it is -1 and the output 0. A NaN score counts as the largest.
  Output index;
};

// A row with nothing to attend to gets output 0, lse -inf (the sink, if there is one) and gradients
// 0, but that the sink gets grad_lse. The results have the same bits whatever num_threads is, and
// however large the batch is; only GradMask::each and grad_tables, which are or may be sums over a
// batch, depend on the batch, and the output and lse of few rows have other last digits where the
// weights are wanted as well. With spans, each item has the bits that it would have alone, and
// nothing is written for rows that are in no span. All throw std::bad_alloc if there is no memory
// for their workspace.
QKV_CORE_API void attention_forward(const Problem& problem, const ForwardResult& result);
// The way in which attention_forward makes the scores of a problem without spans; for passes with
// another value.
QKV_CORE_API ScoreWay score_way_of(const Problem& problem);
QKV_CORE_API void attention_backward(const Problem& problem, const BackwardArgs& args);

// Dropout and sinks of the problem are ignored.
QKV_CORE_API void attention_hard(const Problem& problem, const HardResult& result);

}  // namespace qkv
