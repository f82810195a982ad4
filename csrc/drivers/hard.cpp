// Hard attention, row by row.
#include "attention.h"
#include "dispatch/kernel_table.h"
#include "mask_maps.h"
#include "row_items.h"

namespace qkv {

void attention_hard(const Problem& problem, const HardResult& result) {
  const Kernels& kernels = kernels_for(problem);
  const MappedProblem mapped(problem);
  for_each_row_item(*mapped, {kernels,
                              [&](const Problem& p, int64_t rows) {
                                return kernels.forward_workspace(p, rows, false);
                              },
                              [&](const Problem& p, const ForwardItem& rows, void* workspace) {
                                kernels.hard(p, result, rows, workspace);
                              }});
}

}  // namespace qkv
