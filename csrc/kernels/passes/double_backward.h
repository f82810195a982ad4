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
