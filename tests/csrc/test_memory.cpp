// Workspace that cannot be had is an exception, not a crash.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <new>

#include "cases.h"

namespace qkv::test {
namespace {

// As little more memory as `bytes` while this object lives.
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
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "AddressSanitizer needs terabytes of address space";
#endif
  // Inputs are one number each, expanded: only the workspace is large.
  Case c;
  c.L = 4, c.S = 4, c.D = 4, c.Dv = 4;
  const Workload small(c);
  Problem p = small.problem();
  p.seqlen_q = 1 << 20, p.seqlen_k = 1 << 20, p.head_dim = p.head_dim_v = 1 << 14;
  p.query.strides = p.key.strides = p.value.strides = Strides{};
  float sink = 0;
  const Output nowhere{&sink, Strides{}};
  const Input input = p.query;
  const MemoryLimit limit(rlim_t{1} << 20);
  EXPECT_THROW(attention_forward(p, {nowhere, nowhere}), std::bad_alloc);
  BackwardArgs a;
  a.output = a.lse = a.grad_output = input;
  a.grad_query = a.grad_key = a.grad_value = nowhere;
  EXPECT_THROW(attention_backward(p, a), std::bad_alloc);
}

}  // namespace
}  // namespace qkv::test
