#include "parallel.h"

#include <omp.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <vector>

namespace qkv {
namespace {

// Some 20 microseconds of one thread; waking a team costs 5 to 20.
constexpr double kSerialFlops = 1e6;

std::atomic<bool> forked{false};

// Before any fork that could follow a use of the library.
const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });

struct Deal {
  const Phase* phase;
  WorkList list;
};

std::vector<Deal> deal(int num_threads, int64_t jobs, std::initializer_list<Phase> phases) {
  std::vector<Deal> deals;
  std::vector<Items> items(jobs);
  for (const Phase& phase : phases) {
    for (int64_t job = 0; job < jobs; ++job) items[job] = phase.items(job);
    WorkList list(items, num_threads);
    if (list.runs() > 0) deals.push_back({&phase, std::move(list)});
  }
  return deals;
}

// One thread's part of a phase. Every thread of the team comes here.
void take_part(const Deal& deal, int64_t round) {
  const int thread = omp_get_thread_num();
  const auto run = [&](int64_t at) {
    deal.list.for_each_item(at, round, [&](int64_t job, int64_t index) {
      deal.phase->run({job, index, round, thread});
    });
  };
  if (deal.list.one_run_a_thread()) {
    // The team may be smaller than asked for.
    for (int64_t at = thread; at < deal.list.runs(); at += omp_get_num_threads()) run(at);
  } else {
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t at = 0; at < deal.list.runs(); ++at) run(at);
  }
}

void run_here(int64_t jobs, std::initializer_list<Phase> phases) {
  int64_t rounds = 1;
  for (int64_t round = 0; round < rounds; ++round) {
    for (const Phase& phase : phases) {
      for (int64_t job = 0; job < jobs; ++job) {
        const Items items = phase.items(job);
        if (round >= items.rounds) continue;
        rounds = std::max(rounds, items.rounds);
        for (int64_t at = 0; at < items.count; ++at) phase.run({job, at, round, 0});
      }
    }
  }
}

}  // namespace

int usable_threads(int wanted, double flops) {
  if (wanted <= 1 || flops < kSerialFlops || registered != 0 || forked || omp_in_parallel())
    return 1;
  return wanted;
}

bool in_forked_child() { return forked; }

void parallel_phases(int num_threads, int64_t jobs, std::initializer_list<Phase> phases) {
  if (num_threads <= 1) return run_here(jobs, phases);
  const std::vector<Deal> deals = deal(num_threads, jobs, phases);
  int64_t rounds = 0;
  for (const Deal& deal : deals) rounds = std::max(rounds, deal.list.rounds());
#pragma omp parallel num_threads(num_threads)
  {
    bool wait = false;
    for (int64_t round = 0; round < rounds; ++round) {
      for (const Deal& deal : deals) {
        // Waiting is dear when the machine is busy: only where it must be, and
        // at the end of the region.
        if (wait) {
#pragma omp barrier
        }
        take_part(deal, round);
        wait = deal.phase->wait;
      }
    }
  }
}

}  // namespace qkv
