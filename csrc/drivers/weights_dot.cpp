// Dot products of weights and their gradients, row by row.
#include "attention.h"
#include "dispatch/kernel_table.h"
#include "row_items.h"

namespace qkv {

void attention_weights_dot(const Problem& p, const BackwardArgs& args, const Output& dot) {
  const Kernels& kernels = active_kernels(p.dtype);
  for_each_row_item({{p, kernels, [&](int64_t) { return kernels.backward_workspace(p, 0); },
                      [&](const ForwardItem& item, void* workspace) {
                        kernels.weights_dot(p, args, dot, item, workspace);
                      }}});
}

}  // namespace qkv
