// torch's own operators in the child of a fork().
#pragma once

#include <ATen/Parallel.h>
#include <omp.h>

#include "threads/parallel.h"

namespace qkv {

// In a forked child, keeps the torch operators that this thread calls from opening a parallel
// region, as long as this lives: libgomp's threads are gone there, and torch would wait for them
// for ever. Elsewhere it does nothing. What the user sees of torch's settings does not change:
// OpenMP keeps this number for each thread, and it is put back; at::set_num_threads would set it
// for the whole process.
class OneThreadAfterFork {
 public:
  OneThreadAfterFork() {
    if (!in_forked_child()) return;
    before_ = at::get_num_threads();  // asked first: torch sets each thread's number on first use
    omp_set_num_threads(1);
  }
  ~OneThreadAfterFork() {
    if (before_ > 0) omp_set_num_threads(before_);
  }
  OneThreadAfterFork(const OneThreadAfterFork&) = delete;

 private:
  int before_ = 0;  // 0: nothing to put back
};

}  // namespace qkv
