// Forward-mode derivatives, row by row.
#include "attention_jvp.h"
#include "dispatch/kernel_table.h"
#include "mask_maps.h"
#include "row_items.h"

namespace qkv {

void attention_jvp(const Problem& problem, const JvpArgs& args, const JvpResult& result) {
  const Kernels& kernels = jvp_kernels(problem.dtype);
  const MappedProblem mapped(problem);
  for_each_row_item(*mapped, {kernels,
                              [&](const Problem& p, int64_t rows) {
                                return kernels.jvp_workspace(p, args, rows);
                              },
                              [&](const Problem& p, const ForwardItem& rows, void* workspace) {
                                kernels.jvp(p, args, result, rows, workspace);
                              }});
}

}  // namespace qkv
