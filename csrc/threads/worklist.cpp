#include "worklist.h"

#include <cmath>

namespace qkv {
namespace {

// Items of fewer flops than this are put together into runs of about so many: some 5 us of one
// thread. To fetch an item from the other threads costs a few cache misses, and an item of fewer
// flops is done as fast as that.
constexpr double kCheapFlops = 2e5;
// A phase of such items is dealt out in one run for each thread if no thread gets more flops than
// this: some 300 us. What a thread reads may still be in its cache from the last call then, and no
// thread falls far behind the others. One run for each thread took a third off a call of 256 small
// heads on four cores. A longer phase is fetched run by run, by whoever is free.
constexpr double kShortFlops = 2e7;

}  // namespace

WorkList::WorkList(const std::vector<Items>& jobs, int num_threads) {
  for (size_t job = 0; job < jobs.size(); ++job)
    if (jobs[job].count > 0)
      shares_.push_back({int64_t(job), 0, 0, jobs[job].rounds, jobs[job].flops});
  if (shares_.empty()) return;
  std::stable_sort(shares_.begin(), shares_.end(),
                   [](const Share& a, const Share& b) { return a.flops > b.flops; });
  int64_t at = 0;
  double total = 0;
  for (Share& share : shares_) {
    share.begin = at;
    share.end = at += jobs[share.job].count;
    rounds_ = std::max(rounds_, share.rounds);
    total += double(share.end - share.begin) * share.flops;
  }
  cut_into_runs(total, num_threads);
}

void WorkList::cut_into_runs(double total, int num_threads) {
  one_run_a_thread_ = shares_.front().flops < kCheapFlops && total < num_threads * kShortFlops;
  const double run_flops = one_run_a_thread_ ? total / num_threads : kCheapFlops;
  double left = run_flops;  // how many flops the open run still lacks
  for (const Share& share : shares_) {
    for (int64_t at = share.begin; at < share.end;) {
      // The open run gets the number of items that comes closest to `left`, and at least one.
      const double wanted = share.flops > 0 ? std::round(left / share.flops) : HUGE_VAL;
      const int64_t most = share.end - at;
      const int64_t items = wanted < double(most) ? std::max<int64_t>(1, int64_t(wanted)) : most;
      at += items;
      left -= double(items) * share.flops;
      if (left >= 0.5 * share.flops) continue;
      run_ends_.push_back(at);
      // With one run for each thread the runs are equal shares of the whole: what one run has too
      // much, the next has less.
      left = one_run_a_thread_ ? left + run_flops : run_flops;
    }
  }
  if (run_ends_.empty() || run_ends_.back() != shares_.back().end)
    run_ends_.push_back(shares_.back().end);
}

}  // namespace qkv
