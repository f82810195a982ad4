// A WorkList has every item once: dear items are runs of their own and come first, and cheap items
// are put together into runs of equal work.
#include "threads/worklist.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <utility>
#include <vector>

namespace qkv::test {
namespace {

constexpr double kDear = 1e7, kCheap = 1e3;

using Portion = std::vector<std::pair<int64_t, int64_t>>;  // the {job, index} of a run's items

std::vector<Portion> runs_of(const WorkList& list) {
  std::vector<Portion> runs(list.runs());
  for (int64_t r = 0; r < list.runs(); ++r)
    list.for_each_item(r, [&](int64_t job, int64_t at) { runs[r].emplace_back(job, at); });
  return runs;
}

void expect_each_once(const std::vector<Portion>& runs, const std::vector<Items>& jobs) {
  std::map<std::pair<int64_t, int64_t>, int> seen;
  for (const Portion& run : runs)
    for (const auto& item : run) ++seen[item];
  size_t items = 0;
  for (size_t job = 0; job < jobs.size(); ++job) {
    items += size_t(jobs[job].count);
    for (int64_t at = 0; at < jobs[job].count; ++at) {
      const int times = seen[{int64_t(job), at}];
      EXPECT_EQ(times, 1) << "item " << at << " of job " << job;
    }
  }
  EXPECT_EQ(seen.size(), items) << "items that do not exist";
}

double flops_of(const Portion& run, const std::vector<Items>& jobs) {
  double sum = 0;
  for (const auto& [job, at] : run) sum += jobs[job].flops;
  return sum;
}

TEST(WorkList, Nothing) {
  EXPECT_EQ(WorkList({}, 4).runs(), 0);
  EXPECT_EQ(WorkList({{0, kDear}, {0, kCheap}}, 4).runs(), 0);
}

TEST(WorkList, DearItemsAreRunsOfTheirOwnAndComeFirst) {
  const std::vector<Items> jobs = {{100, kCheap}, {3, kDear}, {0, kDear}, {2, 10 * kDear}};
  const WorkList list(jobs, 4);
  const std::vector<Portion> runs = runs_of(list);
  expect_each_once(runs, jobs);
  EXPECT_FALSE(list.one_run_a_thread());
  ASSERT_EQ(runs.size(), 6u);  // 2 + 3 dear items, and all cheap ones together
  for (int r = 0; r < 5; ++r) EXPECT_EQ(runs[r], Portion({{r < 2 ? 3 : 1, r < 2 ? r : r - 2}}));
  EXPECT_EQ(runs[5].size(), 100u);
}

// The items of 10000 documents are not handed out one by one.
TEST(WorkList, RunsOfManyCheapJobsBesideADearOne) {
  std::vector<Items> jobs(10000, {3, kCheap});
  jobs[5000] = {1, kDear};
  const std::vector<Portion> runs = runs_of(WorkList(jobs, 4));
  expect_each_once(runs, jobs);
  EXPECT_LT(runs.size(), 300u);
  EXPECT_GT(runs.size(), 50u);  // enough for the threads to end at about the same time
}

TEST(WorkList, CheapItemsAreOneRunAThread) {
  for (int threads : {2, 3, 4, 7}) {
    for (const std::vector<Items>& jobs :
         {std::vector<Items>{{256, kCheap}}, {{255, kCheap}}, {{90, kCheap}, {57, 3 * kCheap}}}) {
      const WorkList list(jobs, threads);
      const std::vector<Portion> runs = runs_of(list);
      expect_each_once(runs, jobs);
      EXPECT_TRUE(list.one_run_a_thread());
      EXPECT_EQ(runs.size(), size_t(threads));
      double total = 0;
      for (const Portion& run : runs) total += flops_of(run, jobs);
      for (const Portion& run : runs)
        EXPECT_NEAR(flops_of(run, jobs), total / threads, 3 * kCheap) << threads << " threads";
    }
  }
}

TEST(WorkList, ItemsWithoutWorkAreDoneToo) {
  const std::vector<Items> jobs = {{7, 0}, {5, kCheap}};
  expect_each_once(runs_of(WorkList(jobs, 3)), jobs);
  expect_each_once(runs_of(WorkList({jobs[0]}, 3)), {jobs[0]});
}

// A job of which two items run at a time is spread over the list, in its order, among the items of
// others; so of eight threads two are with it as long as there are others.
TEST(WorkList, ItemsThatWaitAreSpreadAmongOthers) {
  const std::vector<Items> jobs = {{200, kDear}, {80, kDear, 40}, {30, 3 * kDear}};
  const std::vector<Portion> runs = runs_of(WorkList(jobs, 8));
  expect_each_once(runs, jobs);
  int64_t next = 0, chained = 0;
  for (size_t r = 0; r < 200; ++r) {
    for (const auto& [job, at] : runs[r]) {
      if (job != 1) continue;
      EXPECT_EQ(at, next++);
      ++chained;
    }
    // The others take (200 + 3 * 30) / 6 = 48 times as long as one item, longer than the 40 steps.
    const double flops = 1e-7 * std::accumulate(runs.begin(), runs.begin() + r + 1, 0.,
                                                [&](double sum, const Portion& run) {
                                                  return sum + flops_of(run, jobs);
                                                });
    EXPECT_NEAR(double(chained), flops / 4, 4) << r;
  }
}

// Whatever steps they are in, a job's items keep their order.
TEST(WorkList, EveryJobKeepsItsOrder) {
  const std::vector<Items> jobs = {{50, kCheap, 7}, {90, kDear, 90}, {31, 0, 3}, {64, kDear, 2}};
  for (int threads : {1, 3, 64}) {
    const std::vector<Portion> runs = runs_of(WorkList(jobs, threads));
    expect_each_once(runs, jobs);
    std::vector<int64_t> next(jobs.size());
    for (const Portion& run : runs)
      for (const auto& [job, at] : run) EXPECT_EQ(at, next[size_t(job)]++);
  }
}

}  // namespace
}  // namespace qkv::test
