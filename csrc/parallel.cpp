#include "parallel.h"

#include <omp.h>
#include <pthread.h>

#include <atomic>

namespace qkv {
namespace {

// Some 20 microseconds of one thread; waking a team costs 5 to 20.
constexpr double kSerialFlops = 1e6;
// Some 5 microseconds: an item that takes as long as a few cache misses.
constexpr double kCheapFlops = 2e5;

std::atomic<bool> forked{false};

// Before any fork that could follow a use of the library.
const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });

}  // namespace

int usable_threads(int wanted, double flops) {
  if (wanted <= 1 || flops < kSerialFlops || registered != 0 || forked || omp_in_parallel())
    return 1;
  return wanted;
}

void parallel_phases(int num_threads, std::initializer_list<Phase> phases) {
  if (num_threads <= 1) {
    for (const Phase& phase : phases)
      for (int64_t item = 0; item < phase.count; ++item) phase.run(item, 0);
    return;
  }
#pragma omp parallel num_threads(num_threads)
  for (const Phase& phase : phases) {
    if (phase.count == 0) continue;
    const int thread = omp_get_thread_num();
    // Waiting is dear when the machine is busy: only between phases, and at the
    // end of the region.
    if (&phase != phases.begin()) {
#pragma omp barrier
    }
    if (phase.flops < kCheapFlops) {
      const int threads = omp_get_num_threads();  // may be fewer than asked for
      const int64_t end = phase.count * (thread + 1) / threads;
      for (int64_t item = phase.count * thread / threads; item < end; ++item)
        phase.run(item, thread);
    } else {
#pragma omp for schedule(dynamic, 1) nowait
      for (int64_t item = 0; item < phase.count; ++item) phase.run(item, thread);
    }
  }
}

}  // namespace qkv
