// Hard attention, row by row.
#include "attention.h"
#include "dispatch/kernel_table.h"
#include "row_items.h"

namespace qkv {

void attention_hard(const Problem& p, const HardResult& result) {
  const Kernels& kernels = active_kernels(p.dtype);
  for_each_row_item(
      {{p, kernels, [&](int64_t rows) { return kernels.forward_workspace(p, rows, false); },
        [&](const ForwardItem& item, void* workspace) {
          kernels.hard(p, result, item, workspace);
        }}});
}

}  // namespace qkv
