#include "worklist.h"

#include <cmath>

namespace qkv {
namespace {

// Some 5 microseconds: an item that takes as long as a few cache misses.
constexpr double kCheapFlops = 2e5;
// Some 300 microseconds of one thread: what it reads may still be in its cache
// from the last call, and no thread falls far behind.
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
  double left = run_flops;  // what the open run still lacks
  for (const Share& share : shares_) {
    for (int64_t at = share.begin; at < share.end;) {
      // As many as come closest to what is left, at least one.
      const double wanted = share.flops > 0 ? std::round(left / share.flops) : HUGE_VAL;
      const int64_t most = share.end - at;
      const int64_t items = wanted < double(most) ? std::max<int64_t>(1, int64_t(wanted)) : most;
      at += items;
      left -= double(items) * share.flops;
      if (left >= 0.5 * share.flops) continue;
      run_ends_.push_back(at);
      // Equal parts of the whole: what one run has too much the next has less.
      left = one_run_a_thread_ ? left + run_flops : run_flops;
    }
  }
  if (run_ends_.empty() || run_ends_.back() != shares_.back().end)
    run_ends_.push_back(shares_.back().end);
}

}  // namespace qkv
