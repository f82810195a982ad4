// Jobs: each of several problems that are solved together has the same bits as if it were alone.
#include <gtest/gtest.h>

#include <deque>

#include "cases.h"

namespace qkv::test {
namespace {

// Workloads, the memory for their results, and the jobs made of both.
struct Together {
  std::deque<Workload> workloads;
  std::deque<Outputs> outputs;
  std::vector<ForwardJob> forward;
  std::vector<BackwardJob> backward;

  Together(const std::vector<Case>& cases, int num_threads) {
    for (Case c : cases) {
      c.num_threads = num_threads;
      const Workload& w = workloads.emplace_back(c);
      for (const Tensor* t : w.inputs()) t->make_read_only();
      const Outputs& o = outputs.emplace_back(w);
      forward.push_back({w.problem(), o.forward_result(true)});
      backward.push_back({w.problem(), o.backward_args()});
    }
  }

  void run() {
    attention_forward(forward);
    for (size_t n = 0; n < outputs.size(); ++n) {
      outputs[n].forward_is_done();
      if (workloads[n].c.grad_weights)
        attention_weights_dot(backward[n].problem, backward[n].args, outputs[n].weights_dot());
    }
    attention_backward(backward);
  }
};

class JobsTest : public IsaTest {
 protected:
  void expect_as_alone(const std::vector<Case>& cases) {
    std::vector<Results> alone;
    for (const Case& c : cases) alone.push_back(test::run(Workload(c)));
    for (int num_threads : {1, 2, 5}) {
      Together all(cases, num_threads);
      all.run();
      for (size_t n = 0; n < cases.size(); ++n) {
        SCOPED_TRACE(::testing::Message() << "job " << n << ": " << all.workloads[n].c);
        all.outputs[n].expect_nothing_else_written();
        expect_identical(all.outputs[n].values(), alone[n]);
      }
      if (HasFailure()) return;
    }
  }
};

QKV_FOR_EACH_ISA(JobsTest);

// A packed batch: documents of any lengths, some of them empty.
std::vector<Case> documents(DType dtype) {
  std::vector<Case> all;
  for (int64_t length : {0, 1, 5, 16, 33, 70, 129, 300, 700, 2, 1}) {
    Case c;
    c.dtype = dtype, c.kv_heads = 2, c.group = 2, c.L = c.S = length, c.D = 16, c.Dv = 8;
    c.dropout_batch = int64_t(all.size()), c.seed = uint64_t(length + 1);
    all.push_back(c);
  }
  return all;
}

TEST_P(JobsTest, Documents) {
  for (DType dtype : kDTypes) {
    std::vector<Case> cases = documents(dtype);
    if (kQuick) cases.resize(7);
    expect_as_alone(cases);
    for (Case& c : cases) {
      c.is_causal = true, c.window_left = 40, c.softcap = 3, c.dropout_p = 0.2;
      c.alibi_slopes = c.grad_alibi_slopes = c.sinks = c.grad_sinks = true;
    }
    expect_as_alone(cases);
  }
}

// Queries and keys of different lengths, and decode steps, whose keys are split.
TEST_P(JobsTest, QueriesAndKeysOfDifferentLengths) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    std::vector<Case> cases = documents(dtype);
    if (kQuick) cases.resize(7);
    for (size_t n = 0; n < cases.size(); ++n) cases[n].L = cases[cases.size() - 1 - n].L;
    expect_as_alone(cases);
    for (Case& c : cases) c.L = 1, c.S *= 3;
    expect_as_alone(cases);
  }
}

// Jobs that have nothing in common but the call, not even the dtype.
TEST_P(JobsTest, RandomCases) {
  uint64_t seed = 3000;
  for (int batch = 0; batch < (kQuick ? 2 : 4) && !HasFailure(); ++batch) {
    std::vector<Case> cases(8);
    for (Case& c : cases) c = random_case(seed++);
    expect_as_alone(cases);
  }
}

TEST_P(JobsTest, None) {
  attention_forward(std::vector<ForwardJob>());
  attention_backward(std::vector<BackwardJob>());
}

}  // namespace
}  // namespace qkv::test
