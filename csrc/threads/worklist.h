// The order and the portions in which threads take the work items of a phase.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace qkv {

// The items of one job (one problem of a call) in one phase. All items take about the same time.
struct Items {
  int64_t count = 0;
  double flops = 0;  // about what one item takes
  // More than 1: items wait for items before them (progress.h), so that the job takes as long as
  // `steps` items one after the other, however many threads there are.
  int64_t steps = 1;
};

// The items of all jobs of a phase, cut into runs. Those with the most flops come first; jobs whose
// items wait for each other are spread over the list, so that threads have other items to do
// meanwhile. A job's own items stay in their order.
//
// A run is the items that a thread fetches at once: a large item is a run of its own, but small
// ones would take longer to fetch one by one than to do. If all items are small, and few, there is
// one run for each thread, the same in each call, so that neighbours in memory stay on one core.
class WorkList {
 public:
  // jobs[j]: the items of job j.
  WorkList(const std::vector<Items>& jobs, int num_threads);

  int64_t runs() const { return int64_t(run_ends_.size()); }
  // Whether run r is meant for thread r; else any thread that is free fetches it.
  bool one_run_a_thread() const { return one_run_a_thread_; }

  // Calls do_item(job, index) for every item of the run.
  template <class F>
  void for_each_item(int64_t run, const F& do_item) const {
    int64_t at = run == 0 ? 0 : run_ends_[run - 1];
    const int64_t end = run_ends_[run];
    auto share = std::upper_bound(shares_.begin(), shares_.end(), at,
                                  [](int64_t x, const Share& s) { return x < s.end; });
    for (; at < end; at = share++->end)
      for (const int64_t stop = std::min(end, share->end); at < stop; ++at)
        do_item(share->job, share->first + at - share->begin);
  }

 private:
  // Some neighbouring items of one job, from item `first` on: [begin, end) in the list of all
  // items.
  struct Share {
    int64_t job, first, begin, end;
    double flops;  // of one item
  };
  struct Stream;

  void merge(std::vector<Stream> streams);
  // `total`: the flops of all items.
  void cut_into_runs(double total, int num_threads);

  std::vector<Share> shares_;      // in the order of the list
  std::vector<int64_t> run_ends_;  // in the list of all items, ascending
  bool one_run_a_thread_ = false;
};

}  // namespace qkv
