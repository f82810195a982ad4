// The OpenMP threads of a process stay the same, however little there is for them to do:
// libgomp ends those that a smaller team leaves out, and starts them anew for the next full one.
#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <string>

#include "cases.h"
#include "threads/parallel.h"

namespace qkv::test {
namespace {

constexpr int kTeam = 8;

std::set<std::string> ids_of_threads() {
  std::set<std::string> ids;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task"))
    ids.insert(task.path().filename());
  return ids;
}

// The threads of a region like those that torch opens between two calls of ours: with as many
// threads as it may use.
std::set<std::string> threads_of_a_full_team() {
  int team = 0;
#pragma omp parallel num_threads(kTeam) reduction(+ : team)
  team += 1;
  EXPECT_EQ(team, kTeam);
  return ids_of_threads();
}

// From one head to many, the passes have fewer items than there are threads, as many, and more.
TEST(Team, CallsOfAnySizeStartNoThreads) {
  const std::set<std::string> before = threads_of_a_full_team();
  ASSERT_GE(before.size(), size_t(kTeam));
  for (int64_t heads : {1, 3, 5, 20}) {
    for (int64_t L : {1, 64, 130}) {
      Case c;
      c.kv_heads = heads, c.L = L, c.S = 700, c.D = 32, c.Dv = 32, c.grad_weights = true;
      c.num_threads = kTeam;
      SCOPED_TRACE(::testing::Message() << c);
      const Workload w(c);
      run(w);
      EXPECT_EQ(threads_of_a_full_team(), before);
      run_hard(w);
      EXPECT_EQ(threads_of_a_full_team(), before);
    }
  }
}

// A thread for which there is no item is in the team all the same, and runs none.
TEST(Team, ThreadsWithoutItems) {
  const std::set<std::string> before = threads_of_a_full_team();
  for (int working = 1; working <= kTeam; ++working) {
    for (double flops : {1e3, 1e9}) {  // one run for each thread, and runs for any thread
      std::vector<int> done(100), out_of_range(100);
      const Items items{100, flops};
      parallel_phases({kTeam, working}, 1,
                      {{[&](int64_t) { return items; },
                        [&](const Item& item) {
                          ++done[size_t(item.index)];
                          if (item.thread >= working) ++out_of_range[size_t(item.index)];
                        },
                        true}});
      EXPECT_EQ(done, std::vector<int>(100, 1));
      EXPECT_EQ(out_of_range, std::vector<int>(100, 0));
      EXPECT_EQ(threads_of_a_full_team(), before);
    }
  }
}

}  // namespace
}  // namespace qkv::test
