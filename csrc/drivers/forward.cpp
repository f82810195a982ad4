#include <vector>

#include "attention.h"
#include "forward_task.h"
#include "pass.h"

namespace qkv {
namespace {

void add(const Problem& p, const ForwardResult& result, Pass<ForwardTask>& pass) {
  if (p.batch() > 0 && p.heads > 0 && p.seqlen_q > 0) pass.add(p, result);
}

}  // namespace

void attention_forward(const Problem& problem, const ForwardResult& result) {
  Pass<ForwardTask> pass(1, problem.num_threads);
  add(problem, result, pass);
  pass.run();
}

void attention_forward(const std::vector<ForwardJob>& jobs) {
  if (jobs.empty()) return;
  Pass<ForwardTask> pass(jobs.size(), jobs.front().problem.num_threads);
  for (const ForwardJob& job : jobs) add(job.problem, job.result, pass);
  pass.run();
}

}  // namespace qkv
