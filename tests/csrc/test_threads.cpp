// Results have the same bits for any number of threads, any batch size and any caller, and no
// caller hangs.
#include <gtest/gtest.h>
#include <omp.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <set>
#include <string>
#include <thread>

#include "cases.h"

namespace qkv::test {
namespace {

class ThreadsTest : public IsaTest {};

QKV_FOR_EACH_ISA(ThreadsTest);

// Cases that are large enough for every way of cutting the work, and small enough to be quick.
std::vector<Case> cases() {
  Case heads;
  heads.batch = {2}, heads.kv_heads = 3, heads.group = 2;
  heads.L = 70, heads.S = 90, heads.D = 40, heads.Dv = 24;
  Case one_head;
  one_head.L = 300, one_head.S = 700, one_head.D = 32, one_head.Dv = 32;
  Case causal = one_head;
  causal.S = 300, causal.is_causal = true, causal.mask_type = MaskType::f32;
  Case decode;
  decode.batch = {2}, decode.group = 4, decode.L = 1, decode.S = 3000;
  decode.D = 64, decode.Dv = 64;
  if (kQuick) one_head.L = 130, one_head.S = 600, causal.L = 150, decode.S = 1100;
  std::vector<Case> all;
  for (Case c : {heads, one_head, causal, decode}) {
    all.push_back(c);
    c.dtype = DType::f64;
    c.sinks = c.grad_sinks = c.alibi_slopes = c.grad_alibi_slopes = true;
    c.window_left = 50, c.softcap = 2, c.dropout_p = 0.3;
    c.weights = c.grad_weights = true;
    c.mask_type = MaskType::f32, c.grad_mask = c.grad_mask_keys = c.grad_mask_queries = true;
    all.push_back(c);
    c.dtype = DType::f32;
    c.window_left = -1, c.share_batch = c.share_heads = true;
    all.push_back(c);
    c.dtype = all.size() % 8 < 4 ? DType::bf16 : DType::f16;
    c.mask_type = float_masks(c.dtype).back(), c.share_heads = false;
    all.push_back(c);
  }
  return all;
}

Results run_with(int num_threads, Workload& w) {
  w.c.num_threads = num_threads;
  return run(w);
}

TEST_P(ThreadsTest, AnyNumberOfThreads) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(::testing::Message() << c);
    Workload w(c);
    const Results expected = run_with(1, w);
    for (int num_threads : {2, 3, 7}) expect_identical(run_with(num_threads, w), expected);
  }
}

// Far more threads than cores, so that the one that is waited for often has none: of one plane,
// whose cells wait for each other, and of planes that share a mask's gradient.
TEST_P(ThreadsTest, SixtyFourThreads) {
  Case c;
  c.L = kQuick ? 450 : 1000, c.S = kQuick ? 520 : 1300, c.D = 32, c.Dv = 16;
  for (DType dtype : {DType::f32, DType::bf16}) {
    for (bool is_causal : {false, true}) {
      c.dtype = dtype, c.is_causal = is_causal, c.window_left = is_causal ? 300 : -1;
      c.kv_heads = is_causal ? 3 : 1, c.share_heads = is_causal;
      c.mask_type = is_causal ? MaskType::f32 : MaskType::none, c.grad_mask = is_causal;
      SCOPED_TRACE(::testing::Message() << c);
      Workload w(c);
      const Results expected = run_with(1, w);
      for (int i = 0; i < 3; ++i) expect_identical(run_with(64, w), expected);
    }
  }
}

TEST_P(ThreadsTest, RunToRun) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(::testing::Message() << c);
    Workload w(c);
    const Results expected = run_with(3, w);
    for (int i = 0; i < 2; ++i) expect_identical(run_with(3, w), expected);
  }
}

// Batch item b of eight, as a batch of its own.
Workload item(const Workload& eight, int64_t b) {
  Case c = eight.c;
  c.batch = {}, c.dropout_batch += b;
  Workload one(c);
  const auto copy = [&](Tensor& to, const Tensor& from) {
    for (int64_t i = 0; i < to.numel(); ++i) to.set(i, from.get(b * to.numel() + i));
  };
  for (size_t n = 0; n < eight.inputs().size(); ++n)
    if (*eight.inputs()[n]) copy(*one.inputs()[n], *eight.inputs()[n]);
  return one;
}

Results eighth(const Results& all, int64_t b) {
  Results one;
  for (const NamedResult& r : kResults) {
    const std::vector<double>& from = all.*r.values;
    const auto n = int64_t(from.size()) / 8;
    (one.*r.values).assign(from.begin() + b * n, from.begin() + (b + 1) * n);
  }
  return one;
}

TEST_P(ThreadsTest, ABatchOfOneAndTheSameItemAmongEight) {
  for (Case c : cases()) {
    c.batch = {8};
    c.L = (c.L + 3) / (kQuick ? 4 : 2);
    c.num_threads = 4;
    SCOPED_TRACE(::testing::Message() << c);
    const Workload all(c);
    const Results r = run(all);
    for (int64_t b : {0, 5}) {
      Results alone = run(item(all, b)), among = eighth(r, b);
      if (c.share_batch)  // these are sums over the batch, the only results that depend on it
        alone.grad_mask = among.grad_mask, alone.grad_bias = among.grad_bias;
      expect_identical(alone, among);
    }
  }
}

// Expects that the calls of run_all(w, results), each on so many threads, give what one thread
// does.
template <class RunAll>
void expect_what_one_thread_does(int num_threads, size_t calls, const RunAll& run_all) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(::testing::Message() << c);
    Workload w(c);
    const Results expected = run_with(1, w);
    w.c.num_threads = num_threads;
    std::vector<Results> results(calls);
    run_all(w, results);
    for (const Results& r : results) expect_identical(r, expected);
  }
}

TEST_P(ThreadsTest, CallsFromSeveralThreadsAtOnce) {
  expect_what_one_thread_does(2, 5, [](const Workload& w, std::vector<Results>& results) {
    std::vector<std::thread> threads;
    for (Results& r : results) threads.emplace_back([&] { r = run(w); });
    for (std::thread& t : threads) t.join();
  });
}

TEST_P(ThreadsTest, InsideAParallelRegionOfTheCaller) {
  expect_what_one_thread_does(4, 3, [](const Workload& w, std::vector<Results>& results) {
#pragma omp parallel for num_threads(3) schedule(static, 1)
    for (int i = 0; i < 3; ++i) results[i] = run(w);
  });
}

std::set<std::string> threads_of_process() {
  std::set<std::string> found;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task"))
    found.insert(task.path().filename());
  return found;
}

// Inside a parallel region the calling thread does all the work, even if OpenMP would allow more
// threads. Threads are told apart by their names and not counted, since those of earlier tests may
// end at any time.
TEST(NestedRegion, StartsNoThreads) {
  Workload w(cases()[1]);
  w.c.num_threads = 4;
  const int levels = omp_get_max_active_levels();
  omp_set_max_active_levels(3);
#pragma omp parallel num_threads(2)
  run(w);  // starts the team of two
  std::atomic<bool> begun{false}, done{false};
  std::set<std::string> known, seen;
  std::thread watcher([&] {
    known = threads_of_process();  // with the watcher itself
    begun = true;
    while (!done) seen.merge(threads_of_process());
  });
  while (!begun) std::this_thread::yield();
#pragma omp parallel num_threads(2)
  for (int i = 0; i < 5; ++i) run(w);
  done = true;
  watcher.join();
  omp_set_max_active_levels(levels);
  for (const std::string& thread : known) seen.erase(thread);
  EXPECT_TRUE(seen.empty()) << seen.size() << " threads were started";
}

// fork(), when no more than `team` threads are left: one that an earlier test left out of its team
// may be ending, with a lock of the sanitizer's allocator that nobody would open in the child. That
// is libgomp; LLVM's OpenMP, which Clang brings, keeps every thread that it ever started.
pid_t fork_beside([[maybe_unused]] size_t team) {
#ifndef __clang__
  for (int tries = 0; tries < 10000 && threads_of_process().size() > team; ++tries)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
#endif
  return fork();
}

// The child of a process whose OpenMP threads are running has none of them.
TEST_P(ThreadsTest, AfterFork) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(::testing::Message() << c);
    Workload w(c);
    const Results expected = run_with(4, w);
    const pid_t child = fork_beside(4);
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(60);  // a child that hangs is ended
      expect_identical(run_with(4, w), expected);
      _exit(HasFailure() ? 1 : 0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
    EXPECT_EQ(WEXITSTATUS(status), 0);
    expect_identical(run_with(4, w), expected);  // the parent still has its threads
  }
}

// The child of a fork may be the first to use the library.
TEST(Fork, ParentUsedOpenMPButNotTheLibrary) {
  int team = 0;
#pragma omp parallel num_threads(4) reduction(+ : team)
  team += 1;
  EXPECT_EQ(team, 4);
  const pid_t child = fork_beside(4);
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);
    Workload w(cases()[0]);
    w.c.num_threads = 4;
    expect_truth(w);
    _exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace qkv::test
