#include "worklist.h"

#include <cmath>
#include <utility>

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

// The items of one or more jobs, one after the other, and when they could begin if there were no
// others: a job's first item at `begins`, and every other one `pace` flops of a thread later.
struct WorkList::Stream {
  struct Part {
    int64_t job, count;
    double flops, begins, pace;
  };
  std::vector<Part> parts;
  size_t part = 0;   // of the next item
  int64_t next = 0;  // its index in the part

  bool is_empty() const { return part == parts.size(); }
  double begins() const { return parts[part].begins + double(next) * parts[part].pace; }
  double ends() const {
    return parts.empty() ? 0 : parts.back().begins + double(parts.back().count) * parts.back().pace;
  }
  void append(int64_t job, const Items& items, double pace) {
    parts.push_back({job, items.count, items.flops, ends(), pace});
  }
};

WorkList::WorkList(const std::vector<Items>& jobs, int num_threads) {
  std::vector<int64_t> order;
  double total = 0, waiting_threads = 0;
  for (int64_t job = 0; job < int64_t(jobs.size()); ++job) {
    if (jobs[job].count == 0) continue;
    order.push_back(job);
    total += double(jobs[job].count) * jobs[job].flops;
    if (jobs[job].steps > 1) waiting_threads += double(jobs[job].count) / double(jobs[job].steps);
  }
  if (order.empty()) return;
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return jobs[a].flops > jobs[b].flops; });
  // Jobs whose items wait get as many threads as they have items at a time; all others share what
  // is left, which is an eighth at least: threads that have to wait begin with them early.
  const double threads = std::max(1., double(num_threads));
  const double left = std::max(threads / 8, threads - waiting_threads);
  std::vector<Stream> streams(1);
  for (const int64_t job : order) {
    const Items& items = jobs[job];
    if (items.steps == 1) {
      streams[0].append(job, items, items.flops / left);
    } else {
      const double at_a_time = std::min(threads, double(items.count) / double(items.steps));
      streams.emplace_back().append(job, items, items.flops / at_a_time);
    }
  }
  merge(std::move(streams));
  cut_into_runs(total, num_threads);
}

// Appends the items of all streams in the order in which they could begin.
void WorkList::merge(std::vector<Stream> streams) {
  const auto first_of = [&](const Stream* without) {
    Stream* first = nullptr;
    for (Stream& s : streams)
      if (&s != without && !s.is_empty() && (!first || s.begins() < first->begins())) first = &s;
    return first;
  };
  while (Stream* const stream = first_of(nullptr)) {
    const Stream* const other = first_of(stream);
    const double until = other ? other->begins() : HUGE_VAL;
    do {
      const Stream::Part& part = stream->parts[stream->part];
      int64_t count = part.count - stream->next;
      if (part.pace > 0 && until < HUGE_VAL)
        count = std::clamp<int64_t>(int64_t((until - stream->begins()) / part.pace) + 1, 1, count);
      const int64_t begin = shares_.empty() ? 0 : shares_.back().end;
      shares_.push_back({part.job, stream->next, begin, begin + count, part.flops});
      stream->next += count;
      if (stream->next == part.count) ++stream->part, stream->next = 0;
    } while (!stream->is_empty() && stream->begins() <= until);
  }
}

void WorkList::cut_into_runs(double total, int num_threads) {
  const double most = std::max_element(shares_.begin(), shares_.end(), [](auto& a, auto& b) {
                        return a.flops < b.flops;
                      })->flops;
  one_run_a_thread_ = most < kCheapFlops && total < num_threads * kShortFlops;
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
