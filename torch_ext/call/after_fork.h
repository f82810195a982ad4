// torch's own operators in the child of a fork().
#pragma once

#include <ATen/Parallel.h>
#include <omp.h>

#include "threads/parallel.h"

// Of MKL, where torch has it: the calling thread's number, 0 for the process's. Returns the last.
extern "C" [[gnu::weak]] int MKL_Set_Num_Threads_Local(int threads);

namespace qkv {

// In a forked child, keeps the torch operators that this thread calls from opening a parallel
// region, as long as this lives: libgomp's threads are gone there, and torch would wait for them
// for ever. Elsewhere it does nothing. What the user sees of torch's settings does not change:
// OpenMP and MKL keep this number for each thread, and it is put back; at::set_num_threads would
// set it for the whole process. MKL goes by OpenMP's only where nobody has called that.
class OneThreadAfterFork {
 public:
  OneThreadAfterFork() {
    if (!in_forked_child()) return;
    before_ = at::get_num_threads();  // asked first: torch sets each thread's number on first use
    omp_set_num_threads(1);
    if (MKL_Set_Num_Threads_Local) mkl_before_ = MKL_Set_Num_Threads_Local(1);
  }
  ~OneThreadAfterFork() {
    if (before_ == 0) return;
    omp_set_num_threads(before_);
    if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(mkl_before_);
  }
  OneThreadAfterFork(const OneThreadAfterFork&) = delete;

 private:
  int before_ = 0, mkl_before_ = 0;  // before_ 0: nothing to put back
};

}  // namespace qkv
