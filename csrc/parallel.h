// The one place that opens an OpenMP region, and what it takes to split work.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>

namespace qkv {

// `count` independent work items; run(item, thread) with thread < num_threads.
struct Phase {
  int64_t count;
  // Of one item, about. Cheap items are dealt out in one run a thread, the same
  // each time: handed out one by one they cost more to fetch than to do, and
  // neighbours in memory end up on different cores. Others go to whoever is free.
  double flops;
  std::function<void(int64_t item, int thread)> run;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How many threads a call of so many floating-point operations may use: 1 if it
// is done before other threads have woken up, 1 inside a parallel region of the
// caller's (those threads are busy already) and in a forked child (libgomp's
// pool does not survive fork, and waiting for it would hang), else `wanted`.
int usable_threads(int wanted, double flops);

// Runs the phases one after the other, the items of each in any order on
// `num_threads` threads, in one parallel region (none for one thread).
// Items must not throw.
void parallel_phases(int num_threads, std::initializer_list<Phase> phases);

}  // namespace qkv
