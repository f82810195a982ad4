// Forward-mode derivatives, row by row.
#include "attention_jvp.h"

#include "dispatch/kernel_table.h"
#include "row_items.h"

namespace qkv {
namespace {

RowPass pass_of(const Problem& p, const JvpArgs& args, const JvpResult& result) {
  const Kernels& kernels = jvp_kernels(p.dtype);
  return {p, kernels, [&](int64_t rows) { return kernels.jvp_workspace(p, args, rows); },
          [&](const ForwardItem& item, void* workspace) {
            kernels.jvp(p, args, result, item, workspace);
          }};
}

}  // namespace

void attention_jvp(const Problem& problem, const JvpArgs& args, const JvpResult& result) {
  for_each_row_item({pass_of(problem, args, result)});
}

void attention_jvp(const std::vector<JvpJob>& jobs) {
  if (jobs.empty()) return;
  std::vector<RowPass> passes;
  for (const JvpJob& job : jobs) passes.push_back(pass_of(job.problem, job.args, job.result));
  for_each_row_item(passes);
}

}  // namespace qkv
