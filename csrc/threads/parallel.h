// The only place of the library that opens an OpenMP region (but for probe/, which measures).
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>

#include "export.h"
#include "worklist.h"

namespace qkv {

// One work item, and the thread that runs it.
struct Item {
  int64_t job;    // the number of the problem among those of the call
  int64_t index;  // 0 ... Items::count of the job - 1
  int thread;     // 0 ... Threads::working - 1
};

// Work items that may run at the same time, but for those that wait for each other (progress.h).
struct Phase {
  std::function<Items(int64_t job)> items;
  std::function<void(const Item&)> run;
  // Whether all items must be done before any item of the next phase begins.
  bool wait = false;
};

// The threads of a call.
struct Threads {
  // The number of threads that the region is opened with: as many as the caller may use, which is
  // also the number that torch opens its regions with. libgomp ends the threads that a smaller team
  // leaves out, and the next full team would have to start them anew.
  int team = 1;
  // How many of them get items, and memory to work in. The others wait for the end of the region.
  int working = 1;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How many threads a call of `flops` floating-point operations may use: `wanted`, but
//   1 if the call is done before other threads have woken up,
//   1 inside a parallel region of the caller's, whose threads are busy already,
//   1 in a forked child: libgomp's pool does not survive fork, and waiting for it would hang.
QKV_CORE_API int usable_threads(int wanted, double flops);

// Whether this process is the child of a fork() since the library was loaded.
QKV_CORE_API bool in_forked_child();

// Runs the phases one after the other. The threads take the items of a phase in the order of its
// WorkList, in one parallel region; if only one thread works, it is the caller's, without a region.
// Items must not throw.
QKV_CORE_API void parallel_phases(const Threads& threads, int64_t jobs,
                                  std::initializer_list<Phase> phases);

}  // namespace qkv
