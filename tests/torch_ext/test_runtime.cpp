// Threads: the process has one OpenMP runtime, calls obey torch's settings, and may come from
// several threads and from the child of a fork.
#include <ATen/Parallel.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <set>
#include <thread>

#include "common.h"

namespace qkv::test::runtime_tests {
namespace {

// Results are bitwise the same for any number of threads, so any difference is an error.
class Runtime : public testing::Test {
 protected:
  const int threads = at::get_num_threads();
  at::Tensor query = randn({2, 4, 130, 32}, at::kFloat), key = randn({2, 4, 150, 32}, at::kFloat),
             value = randn({2, 4, 150, 32}, at::kFloat);
  at::Tensor output = attention(query, key, value);
  at::Tensor gradient = torch::autograd::grad({output.sum()}, {key})[0];

  void TearDown() override { at::set_num_threads(threads); }

  bool same() const {
    const auto again = attention(query, key, value);
    return at::equal(again, output) &&
           at::equal(torch::autograd::grad({again.sum()}, {key})[0], gradient);
  }
};

TEST_F(Runtime, OneOpenMpRuntimeIsLoaded) {
  std::ifstream maps("/proc/self/maps");
  std::set<std::string> runtimes;
  for (std::string line; std::getline(maps, line);) {
    const size_t path = line.find('/');
    if (path == std::string::npos) continue;
    const std::string file = line.substr(line.rfind('/') + 1);
    if (file.rfind("libgomp", 0) == 0 || file.rfind("libomp", 0) == 0 ||
        file.rfind("libiomp", 0) == 0)
      runtimes.insert(line.substr(path));
  }
  EXPECT_EQ(runtimes.size(), 1u) << testing::PrintToString(runtimes);
}

TEST_F(Runtime, SameResultForAnyNumberOfThreads) {
  for (const int n : {1, 2, 3, 4}) {
    at::set_num_threads(n);
    EXPECT_TRUE(same()) << n << " threads";
  }
}

TEST_F(Runtime, CalledFromSeveralThreads) {
  std::atomic<int> right = 0;
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i)
    callers.emplace_back([&] {
      for (int repeat = 0; repeat < 5; ++repeat) right += same();
    });
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(right, 20);
}

TEST_F(Runtime, CalledInsideAParallelRegion) {
  std::atomic<int> right = 0;
  at::parallel_for(0, 8, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) right += same();
  });
  EXPECT_EQ(right, 8);
}

// The child of a fork has none of its parent's threads, and must not wait for them.
TEST_F(Runtime, CalledAfterFork) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);  // a hang ends here, with a signal
    torch::NoGradGuard guard;
    const auto again = attention(query, key, value);
    // at::equal would hang here: torch's own parallel loops do so in the child of a fork.
    _exit(std::memcmp(again.const_data_ptr(), output.const_data_ptr(), output.nbytes()) ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(same());
}

}  // namespace
}  // namespace qkv::test::runtime_tests
