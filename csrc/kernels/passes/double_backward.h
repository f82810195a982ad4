// The pass for second derivatives over one BackwardItem: the loops of the backward pass around
// other tiles. With ' for a direction and for the change along it (attention_double_backward.h), P'
// for the changes of weights, W for the gradients of scores and W' for their changes
// (double_softmax.h), there are ten products:
//
//   S^T = K Q^T    T^T = K Q'^T + K' Q^T    dP^T = V dO^T    dP'^T = V' dO^T
//   dQ^T += K^T W'^T + K'^T W^T    dK += W'^T Q + W^T Q'    dV += P'^T dO
#pragma once

#include "kernels/passes/backward.h"
#include "kernels/passes/double_backward_state.h"
#include "kernels/passes/double_grad_tile.h"

namespace qkv::QKV_ISA {

// The overload of backward.h's function.
template <class E>
void clear_keys(const DoubleTile<E>& t, int64_t from, int64_t to, const DoubleScratch<E>& s) {
  clear_keys<E>(static_cast<const BackwardTile<E>&>(t), from, to, s);
  clear_tile(t.tile, to - from, s.change + from * kGradRows + t.lane);
}

// The overload of backward.h's function.
template <class E, class T = Compute<E>>
void add_grad_key_value(const Problem& p, const BackwardArgs& a, int64_t lane, int64_t depth,
                        int64_t keys, T* grad_key, T* grad_value, const DoubleScratch<E>& s) {
  const RowRange rows{lane, depth};
  if (a.grad_value.data && s.has_grad_output)
    add_grad_rows(rows, keys, s.grad_output, s.weights, s.nonfinite_grad_output, p.head_dim_v,
                  grad_value, s);
  if (!a.grad_key.data) return;
  add_grad_rows(rows, keys, s.query, s.change, s.nonfinite_query, p.head_dim, grad_key, s);
  if (s.moves_query())
    add_grad_rows(rows, keys, s.query_jvp, s.grad_scores, s.nonfinite_query_jvp, p.head_dim,
                  grad_key, s);
}

template <class E>
void double_backward(const Problem& p, const BackwardArgs& a, const BackwardItem& item,
                     void* workspace) {
  Arena arena(workspace);
  DoubleScratch<E> s(arena, p, *a.direction, item.key_end - item.key_begin);
  backward_item(p, a, item, s);
}

template <class E>
size_t double_backward_workspace(const Problem& p, const BackwardDirection& direction,
                                 int64_t keys) {
  Arena arena(nullptr);
  DoubleScratch<E>(arena, p, direction, keys);
  return arena.used();
}

}  // namespace qkv::QKV_ISA
