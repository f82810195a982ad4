// The one place that opens an OpenMP region.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>

#include "export.h"
#include "worklist.h"

namespace qkv {

// One work item, as its phase runs it.
struct Item {
  int64_t job;
  int64_t index;  // < Items::count of the job
  int64_t round;
  int thread;  // < Threads::working
};

// Work items that may run at the same time.
struct Phase {
  std::function<Items(int64_t job)> items;
  std::function<void(const Item&)> run;
  // Whether all of it must be done before anything that follows begins.
  bool wait = false;
};

// The threads of a call.
struct Threads {
  // How many the region is opened with: as many as the caller may use, and as torch opens its own
  // with. libgomp ends the threads that a smaller team leaves out, and the next full team would
  // have to start them anew.
  int team = 1;
  // How many of them get items, and with them memory to work in; the others wait for the end.
  int working = 1;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How many threads a call of so many floating-point operations may use: 1 if it
// is done before other threads have woken up, 1 inside a parallel region of the
// caller's (those threads are busy already) and in a forked child (libgomp's
// pool does not survive fork, and waiting for it would hang), else `wanted`.
QKV_CORE_API int usable_threads(int wanted, double flops);

// Whether this process is the child of a fork() since the library was loaded.
QKV_CORE_API bool in_forked_child();

// Takes up the phases one after the other, all of them again for every round, the
// items of each in any order on the working threads, in one parallel region
// (none for one of them). Items must not throw.
QKV_CORE_API void parallel_phases(const Threads& threads, int64_t jobs,
                                  std::initializer_list<Phase> phases);

}  // namespace qkv
