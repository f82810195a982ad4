// The order and the portions in which threads take the work items of a phase.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace qkv {

// The items of one job in one phase, all alike, the same in every round.
struct Items {
  int64_t count = 0;
  double flops = 0;    // of one, about
  int64_t rounds = 1;  // in the first so many
};

// Items of many jobs, the dearest first, cut into runs. A dear item is a run of
// its own; cheap ones, handed out one by one, would cost more to fetch than to
// do. If all are cheap, and few, there is one run a thread, the same each time, so
// that neighbours in memory stay on one core.
class WorkList {
 public:
  // jobs[j]: what job j has to do.
  WorkList(const std::vector<Items>& jobs, int num_threads);

  int64_t rounds() const { return rounds_; }  // of the job with the most
  int64_t runs() const { return int64_t(run_ends_.size()); }
  // Whether run r is meant for thread r, else for whoever is free.
  bool one_run_a_thread() const { return one_run_a_thread_; }

  // do_item(job, index) for every item of a run that takes part in the round.
  template <class F>
  void for_each_item(int64_t run, int64_t round, const F& do_item) const {
    int64_t at = run == 0 ? 0 : run_ends_[run - 1];
    const int64_t end = run_ends_[run];
    auto share = std::upper_bound(shares_.begin(), shares_.end(), at,
                                  [](int64_t x, const Share& s) { return x < s.end; });
    for (; at < end; at = share++->end)
      for (const int64_t stop = std::min(end, share->end); at < stop && round < share->rounds; ++at)
        do_item(share->job, at - share->begin);
  }

 private:
  // One job's items, in the list of all.
  struct Share {
    int64_t job, begin, end, rounds;
    double flops;  // of one item
  };

  void cut_into_runs(double total, int num_threads);

  std::vector<Share> shares_;      // dearest first
  std::vector<int64_t> run_ends_;  // ascending
  bool one_run_a_thread_ = false;
  int64_t rounds_ = 0;
};

}  // namespace qkv
