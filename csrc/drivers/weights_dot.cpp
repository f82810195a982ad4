// Dot products of weights and their gradients, row by row.
#include "attention.h"
#include "dispatch/kernel_table.h"
#include "row_items.h"

namespace qkv {

void attention_weights_dot(const Problem& problem, const BackwardArgs& args, const Output& dot) {
  const Kernels& kernels = kernels_for(problem);
  for_each_row_item(
      problem,
      {kernels, [&](const Problem& p, int64_t) { return kernels.backward_workspace(p, 0); },
       [&](const Problem& p, const ForwardItem& rows, void* workspace) {
         kernels.weights_dot(p, args, dot, rows, workspace);
       }});
}

}  // namespace qkv
