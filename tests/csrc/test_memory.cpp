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
    // A workspace of more than 32 MiB is never taken from what earlier tests have freed: from that
    // size on glibc asks the operating system anew.
    p.seqlen_q = 1 << 20, p.seqlen_k = 1 << 20, p.head_dim = p.head_dim_v = 1 << 20;
    p.query.strides = p.key.strides = p.value.strides = Strides{};
    double sink = 0;
    const Output nowhere{&sink, Strides{}};
    const Input input = p.query;
    BackwardArgs a;
    a.output = a.lse = a.grad_output = a.grad_weights = input;
    a.grad_query = a.grad_key = a.grad_value = nowhere;
    const std::vector<Span> spans(2, {0, p.seqlen_q, 0, p.seqlen_k});
    Problem packed = p;
    packed.spans = spans.data(), packed.batch_rank = 1, packed.batch_sizes[0] = 2;
    BackwardArgs packed_args = a;
    packed_args.grad_weights = {};
    const MemoryLimit limit(rlim_t{1} << 20);
    EXPECT_THROW(attention_forward(p, {nowhere, nowhere}), std::bad_alloc);
    EXPECT_THROW(attention_backward(p, a), std::bad_alloc);
    EXPECT_THROW(attention_forward(packed, {nowhere, nowhere}), std::bad_alloc);
    EXPECT_THROW(attention_backward(packed, packed_args), std::bad_alloc);
    EXPECT_THROW(attention_hard(p, {nowhere, {}}), std::bad_alloc);
    EXPECT_THROW(attention_hard(packed, {nowhere, {}}), std::bad_alloc);
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

// Each thread has one workspace, however many items there are.
TEST(Memory, ItemsOfRowsShareTheWorkspacesOfThreads) {
#if defined(QKV_SANITIZER_ALLOCATES)
  GTEST_SKIP() << "a sanitizer allocates on its own";
#endif
  const auto workspaces = [](int64_t heads) {
    Case c;
    c.kv_heads = heads, c.L = c.S = 64, c.D = c.Dv = 1024, c.num_threads = 2;
    const Workload w(c);
    largest_workspace();
    run_hard(w);
    return largest_workspace();
  };
  EXPECT_GT(workspaces(16), 0);
  EXPECT_EQ(workspaces(64), workspaces(16));
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
    // All planes read the same head: as heads of one batch item, as documents of one size, and as
    // documents of two sizes in turn.
    const int64_t numel = c.L * c.D, plane = numel * 4;
    const Tensor to(type_of(dtype), {kHeads, c.L, c.D}, {numel, c.D, 1});
    for (Input* of_head : {&p.query, &p.key, &p.value}) of_head->strides.head = 0;
    for (Input* of_head : {&args.output, &args.lse, &args.grad_output}) of_head->strides.head = 0;
    args.grad_query = to.output();
    args.grad_query.strides.batch[0] = numel;
    Problem heads = p, equal = p;
    heads.heads = heads.kv_heads = kHeads;
    std::vector<Span> spans(kHeads, {0, c.L, 0, c.S}), other_spans = spans;
    for (int64_t n = 0; n < kHeads; n += 2)
      other_spans[size_t(n)].seqlen_q = other_spans[size_t(n)].seqlen_k = c.L - 16;
    equal.batch_rank = 1, equal.batch_sizes[0] = kHeads, equal.spans = spans.data();
    Problem unequal = equal;
    unequal.spans = other_spans.data();
    const auto run = [&](Problem of, int threads) {
      of.num_threads = threads;
      std::memset(args.grad_query.data, 0, size_t(kHeads * numel * size_of(dtype)));
      largest_workspace();
      attention_backward(of, args);
      return largest_workspace();
    };

    for (const Problem& of : {heads, equal, unequal}) {
      run(of, 1);
      const std::vector<double> expected = to.values();
      // Documents of different sizes have the sums of a plane each.
      const int64_t most = of.spans == other_spans.data() ? kHeads * plane + 8 * kMiB : 28 * kMiB;
      EXPECT_LE(run(of, kThreads), most) << dtype << " " << of.heads;
      EXPECT_EQ(to.values(), expected) << dtype << " " << of.heads;
    }
  }
}

}  // namespace
}  // namespace qkv::test
