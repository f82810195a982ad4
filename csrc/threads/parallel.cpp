#include "parallel.h"

#include <omp.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <list>
#include <vector>

#include "observer.h"

namespace qkv {
namespace {

// A call with fewer flops than this stays on the caller's thread: a million flops take one core
// about 20 us (Zen 3, 3.5 GHz, f32), and waking a team of four cost 5 to 20 us there. Too low a
// value slows small calls down, too high a value leaves cores idle for at most these 20 us.
constexpr double kSerialFlops = 1e6;

std::atomic<bool> forked{false};

// The handler is registered when the library is loaded, so that no fork after a use of the library
// goes unnoticed. 0 means that it is.
const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });

// One phase while it is worked off: its items, cut into the runs that threads fetch.
class Deal {
 public:
  Deal(const Phase& phase, const std::vector<Items>& jobs, int threads)
      : phase_(phase), list_(jobs, threads) {}

  bool is_empty() const { return list_.runs() == 0; }
  bool wait() const { return phase_.wait; }

  // Works off runs, as one of the `working` threads, all of which call this.
  void work(int thread, int working) {
    if (list_.one_run_a_thread()) {
      // OpenMP may give fewer threads than were asked for; then some take several runs.
      for (int64_t at = thread; at < list_.runs(); at += working) run(at, thread);
    } else {
      // This is no `omp for`: threads beyond `working` would have to come here too, and would be
      // given items although they have no memory to work in.
      for (int64_t at; (at = next_run_.fetch_add(1, std::memory_order_relaxed)) < list_.runs();)
        run(at, thread);
    }
  }

 private:
  void run(int64_t at, int thread) const {
    list_.for_each_item(at, [&](int64_t job, int64_t index) { phase_.run({job, index, thread}); });
  }

  const Phase& phase_;
  const WorkList list_;
  std::atomic<int64_t> next_run_{0};  // the first run that nobody has taken
};

void run_here(int64_t jobs, std::initializer_list<Phase> phases) {
  for (const Phase& phase : phases)
    for (int64_t job = 0; job < jobs; ++job)
      for (int64_t at = 0, count = phase.items(job).count; at < count; ++at)
        phase.run({job, at, 0});
}

}  // namespace

int usable_threads(int wanted, double flops) {
  if (wanted <= 1 || flops < kSerialFlops || registered != 0 || forked || omp_in_parallel())
    return 1;
  return wanted;
}

bool in_forked_child() { return forked; }

void parallel_phases(const Threads& threads, int64_t jobs, std::initializer_list<Phase> phases) {
  if (observer) return observer->run(threads, jobs, phases);
  if (threads.working <= 1) return run_here(jobs, phases);
  std::list<Deal> deals;
  std::vector<Items> items(jobs);
  for (const Phase& phase : phases) {
    for (int64_t job = 0; job < jobs; ++job) items[job] = phase.items(job);
    if (deals.emplace_back(phase, items, threads.working).is_empty()) deals.pop_back();
  }
#pragma omp parallel num_threads(threads.team)
  {
    const int thread = omp_get_thread_num();
    const int working = std::min(threads.working, omp_get_num_threads());
    bool wait = false;
    for (Deal& deal : deals) {
      // Waiting takes long when the machine is busy, so threads wait only where a phase demands
      // it, and at the end of the region.
      if (wait) {
#pragma omp barrier
      }
      if (thread < working) deal.work(thread, working);
      wait = deal.wait();
    }
  }
}

}  // namespace qkv
