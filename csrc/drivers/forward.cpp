#include "attention.h"
#include "forward_task.h"
#include "mask_maps.h"
#include "pass.h"

namespace qkv {

void attention_forward(const Problem& problem, const ForwardResult& result) {
  if (!problem.spans && problem.seqlen_q == 0) return;
  const MappedProblem mapped(problem);
  const std::vector<Stretch> stretches = stretches_of(problem);
  Pass<ForwardTask> pass(stretches.size(), problem.num_threads);
  for (const Stretch& stretch : stretches) pass.add(*mapped, result, stretch);
  pass.run();
}

}  // namespace qkv
