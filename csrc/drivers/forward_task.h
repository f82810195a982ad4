// The forward pass of one stretch of batch items: how it is cut into work items, and what each item
// does.
//
// An item is some rows of one plane against one split of its keys. Where keys are split, each split
// leaves a part of each row's output in memory, and a second phase merges them. If there are
// planes enough for all threads, an item is a whole plane instead (by plane): it takes split after
// split and merges at the end, and its parts are in its thread's memory. Both give the same bits.
//
// Where the weights are wanted, keys are not split. If the weights of all heads are added up, an
// item is the same rows of all planes of a batch item, one plane after the other.
#pragma once

#include "attention.h"
#include "common/workspace.h"
#include "dispatch/kernel_table.h"
#include "plan.h"
#include "threads/parallel.h"

namespace qkv {

// A task is the forward pass of one stretch. Whoever runs it calls plan() with all the work of the
// call, then take_memory(), and then the items of its two phases: run, finish.
class ForwardTask {
 public:
  ForwardTask(const Problem& call, const ForwardResult& result, const Stretch& stretch);

  // About how many floating-point operations all planes take.
  double flops() const { return double(planes_.count) * planes_.flops; }
  // Decides how many rows an item has, and in which order items go. No row's result depends on the
  // other rows of its item, so this may follow the number of threads.
  void plan(const Team& team);

  size_t workspace_bytes() const;  // of a thread
  void take_memory(Arena& arena);

  // The phases, in their order; `index` counts the items of one. The first runs the kernel.
  Items items() const;
  void run(int64_t index, void* workspace) const;
  Items last_items() const;  // an item merges the parts of one row
  void finish(int64_t index) const;

 private:
  // Rows [begin, end) of item_planes_ planes from `plane` on, against one split of the keys.
  struct Place {
    int64_t plane, split, begin, end;
  };

  ForwardTask(const Problem& call, const ForwardResult& result, const Stretch& stretch,
              const Problem& item);
  void split_keys(const Problem& item);
  void limit_kept_weights();
  // What item `index` is, unless by plane.
  Place place(int64_t index) const;
  // Whether an item is one call of a kernel.
  bool has_simple_items() const {
    return !by_plane_ && item_planes_ == 1 && call_rows_ == item_rows_;
  }
  ForwardItem kernel_item(int64_t plane, int64_t split, int64_t row, int64_t end) const;
  size_t kernel_bytes() const;  // the workspace of a kernel
  void run_rows(int64_t index, void* workspace) const;
  void run_plane(int64_t plane, void* workspace) const;
  void attend(const Problem& item, int64_t plane, int64_t split, int64_t row, int64_t end,
              char* plane_parts, void* workspace, const ForwardItem* next = nullptr) const;
  void merge(const Problem& item, int64_t plane, int64_t row, char* plane_parts) const;

  const Problem& p_;  // of the call
  const ForwardResult& result_;
  const Stretch stretch_;
  const Kernels& kernels_;
  Planes planes_;
  int64_t seqlen_k_;        // of each item
  int64_t splits_ = 1;      // of a plane
  int64_t split_keys_ = 0;  // the keys of a split
  int64_t first_split_;     // the end of the first split
  int64_t item_rows_ = 0,
          row_items_ = 0;    // the rows of an item, and how many such items a plane has
  int64_t call_rows_ = 0;    // the rows that a kernel is called with
  int64_t item_planes_ = 1;  // the planes whose rows an item has
  bool by_plane_ = false;
  // Whether the dearest items of all planes go first, and not the planes one after the other.
  bool by_rows_ = false;
  // The parts of one plane: outputs [splits, rows, Dv], which take output_bytes_, then log-sum-exps
  // [splits, rows]. `element_` is the size of one number.
  int64_t element_, output_bytes_ = 0, parts_bytes_ = 0;
  char* parts_ = nullptr;  // [planes, parts_bytes_], unless by plane
};

}  // namespace qkv
