// The memory of a call: where it cannot be had, there is an exception and no crash, and how much a
// call takes is bounded.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <new>

#include "allocations.h"
#include "cases.h"

namespace qkv::test {
namespace {

// While this object lives, the process may take no more than `bytes` of memory beyond what it has.
class MemoryLimit {
 public:
  explicit MemoryLimit(rlim_t bytes) {
    getrlimit(RLIMIT_AS, &before_);
    rlim_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlimit limit = {pages * rlim_t(sysconf(_SC_PAGESIZE)) + bytes, before_.rlim_max};
    setrlimit(RLIMIT_AS, &limit);
  }
  ~MemoryLimit() { setrlimit(RLIMIT_AS, &before_); }

 private:
  rlimit before_;
};

TEST(Memory, WorkspaceThatCannotBeHad) {
#if defined(QKV_SANITIZER_ALLOCATES)
  GTEST_SKIP() << "a sanitizer needs terabytes of address space";
#endif
  // Each input is one number with strides of 0, so that only the workspace is large.
  for (DType dtype : kDTypes) {
    Case c;
    c.dtype = dtype, c.L = 4, c.S = 4, c.D = 4, c.Dv = 4;
    const Workload small(c);
    Problem p = small.problem();
    p.seqlen_q = 1 << 20, p.seqlen_k = 1 << 20, p.head_dim = p.head_dim_v = 1 << 14;
    p.query.strides = p.key.strides = p.value.strides = Strides{};
    double sink = 0;
    const Output nowhere{&sink, Strides{}};
    const Input input = p.query;
    BackwardArgs a;
    a.output = a.lse = a.grad_output = a.grad_weights = a.grad_weights_dot = input;
    a.grad_query = a.grad_key = a.grad_value = nowhere;
    const std::vector<ForwardJob> forward = {{p, {nowhere, nowhere}}, {p, {nowhere, nowhere}}};
    const std::vector<BackwardJob> backward = {{p, a}, {p, a}};
    const MemoryLimit limit(rlim_t{1} << 20);
    EXPECT_THROW(attention_forward(p, {nowhere, nowhere}), std::bad_alloc);
    EXPECT_THROW(attention_backward(p, a), std::bad_alloc);
    EXPECT_THROW(attention_forward(forward), std::bad_alloc);
    EXPECT_THROW(attention_backward(backward), std::bad_alloc);
    EXPECT_THROW(attention_weights_dot(p, a, nowhere), std::bad_alloc);
    EXPECT_THROW(attention_hard(p, {nowhere, {}}), std::bad_alloc);
  }
}

// Numbers that are hidden and not finite take memory (csrc/repair), which is allocated with the
// workspace, before any thread starts: a thread could not report that there is none.
TEST(Memory, HiddenNaNAllocatesNothingMore) {
#if defined(QKV_SANITIZER_ALLOCATES)
  GTEST_SKIP() << "a sanitizer allocates on its own";
#endif
  for (DType dtype : kDTypes) {
    Case c;
    c.dtype = dtype, c.L = 20, c.S = 300, c.D = c.Dv = 70, c.group = 2;
    c.mask_type = MaskType::boolean, c.is_causal = true, c.window_left = 9, c.softcap = 2;
    c.sinks = c.alibi_slopes = c.grad_weights = true, c.dropout_p = 0.2;
    Workload w(c);
    const Outputs outputs(w);
    const auto allocations_of_a_call = [&] {
      const Problem p = w.problem();
      const ForwardResult result = outputs.forward_result(true);
      const BackwardArgs args = outputs.backward_args();
      const int64_t before = allocations();
      attention_forward(p, result);
      attention_weights_dot(p, args, outputs.weights_dot());
      attention_backward(p, args);
      return allocations() - before;
    };
    allocations_of_a_call();  // a thread keeps the workspace of its first call
    const int64_t finite = allocations_of_a_call();
    w.query.set({0, 2, 0}, kNaN), w.grad_output.set({1, 3, 0}, kInf);
    w.key.set({0, 3, 0}, kNaN), w.value.set({0, 5, 0}, kNaN);
    EXPECT_EQ(allocations_of_a_call(), finite);
    expect_close(outputs.values(), truth(w, outputs.values()), c);
  }
}

// Half precision has its sums in memory of their own, in float32: those of a plane wait until all
// its cells are done, but not those of all planes at the same time, however many threads there are.
TEST(Memory, SumsOfPlanesAreBounded) {
#if defined(QKV_SANITIZER_ALLOCATES)
  GTEST_SKIP() << "a sanitizer allocates on its own";
#endif
  constexpr int64_t kMiB = 1 << 20, kHeads = 30, kThreads = 8;
  Case c;
  c.L = c.S = 2048, c.D = 128, c.Dv = 8, c.window_left = 20;
  c.grad_key = c.grad_value = c.grad_lse = false;
  for (DType dtype : {DType::f32, DType::bf16}) {
    c.dtype = dtype;
    const Workload w(c);
    const Outputs outputs(w);
    Problem p = w.problem();
    BackwardArgs args = outputs.backward_args();
    attention_forward(p, outputs.forward_result(true));
    // All planes read and write the same head.
    const int64_t numel = c.L * c.D;
    const Tensor to(type_of(dtype), {kHeads, c.L, c.D}, {numel, c.D, 1});
    p.heads = p.kv_heads = kHeads;
    for (Input* of_head : {&p.query, &p.key, &p.value}) of_head->strides.head = 0;
    for (Input* of_head : {&args.output, &args.lse, &args.grad_output}) of_head->strides.head = 0;
    args.grad_query = to.output();
    const auto run = [&](int threads, const std::vector<BackwardJob>& jobs) {
      std::vector<BackwardJob> on_threads = jobs;
      on_threads.front().problem.num_threads = threads;
      largest_workspace();
      attention_backward(on_threads);
      return largest_workspace();
    };
    const std::vector<BackwardJob> one = {{p, args}};
    std::vector<BackwardJob> jobs(kHeads, {p, args});  // as many problems of one head
    for (int64_t h = 0; h < kHeads; ++h) {
      jobs[size_t(h)].problem.heads = jobs[size_t(h)].problem.kv_heads = 1;
      auto* const first = static_cast<char*>(args.grad_query.data);
      jobs[size_t(h)].args.grad_query.data = first + h * numel * size_of(dtype);
    }

    for (const auto& all : {one, jobs}) {
      run(1, all);
      const std::vector<double> expected = to.values();
      std::memset(args.grad_query.data, 0, size_t(kHeads * numel * size_of(dtype)));
      // Jobs have the sums of a plane each.
      const int64_t most = all.size() == 1 ? 28 * kMiB : kHeads * numel * 4 + 8 * kMiB;
      EXPECT_LE(run(kThreads, all), most) << dtype << " " << all.size();
      EXPECT_EQ(to.values(), expected) << dtype << " " << all.size();
    }
  }
}

}  // namespace
}  // namespace qkv::test
