// Forward-mode derivatives, row by row.
#include "attention_jvp.h"

#include "dispatch/kernel_table.h"
#include "row_items.h"

namespace qkv {

void attention_jvp(const Problem& p, const JvpArgs& args, const JvpResult& result) {
  const Kernels& kernels = jvp_kernels(p.dtype);
  for_each_row_item(p, kernels,
                    {[&](int64_t rows) { return kernels.jvp_workspace(p, args, rows); },
                     [&](const ForwardItem& item, void* workspace) {
                       kernels.jvp(p, args, result, item, workspace);
                     }});
}

void attention_jvp(const std::vector<JvpJob>& jobs) {
  for (const JvpJob& job : jobs) attention_jvp(job.problem, job.args, job.result);
}

}  // namespace qkv
