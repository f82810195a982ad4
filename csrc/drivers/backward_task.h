// The backward pass of one stretch of batch items: how it is cut into work items, and what each
// item does.
//
// A plane is one batch item and one key/value head. Planes that add to the same elements of the
// gradient of a mask, or of tables, form a class (sharing.h); where nothing is shared, every plane
// is a class of its own. A plane is cut into cells (cells.h), which add to the plane's sums in a
// fixed order.
//
// The work can be ordered in two ways. Both give the same bits; plan() takes the faster one.
//   by class:  an item is a class (of a problem with mask groups, mask_groups.h, the planes of one
//              group in a class), plane after plane, and of a plane one part of the keys after the
//              other, with all strips as one band, or as many as have sums of their own for tables.
//   by cell:   an item is a cell. It waits for the cells that add to the same sums before it, all
//              of which come before it in the list of items, so that some thread has them already.
#pragma once

#include <vector>

#include "attention.h"
#include "cells.h"
#include "common/workspace.h"
#include "dispatch/kernel_table.h"
#include "mask_groups.h"
#include "plan.h"
#include "plane_progress.h"
#include "plane_sums.h"
#include "sharing.h"
#include "table_sums.h"

namespace qkv {

// The backward pass of one stretch, for Pass.
class BackwardTask {
 public:
  // `item`: the problem of any batch item of the stretch.
  BackwardTask(const Problem& call, const BackwardArgs& args, const Stretch& stretch,
               const Problem& item);

  double flops() const { return double(planes_) * plane_flops_; }
  // Chooses between the two orders of work.
  void plan(const Team& team);
  // Takes the order by class, whatever else there is to do.
  void plan_by_class();

  size_t workspace_bytes() const;
  void take_memory(Arena& arena);
  Items items() const;
  void run(int64_t index, void* workspace);
  Items last_items() const;  // an item adds up GradMask::each of one class, over its groups
  void finish(int64_t index) const { groups_.add(index); }
  // Once all is done: what the stretch adds to the gradient of tables.
  void add_tables() const { tables_.add(); }

  // One class, for a task that works by class and has no mask groups: that of a single batch item.
  int64_t classes() const { return sharing_.classes(); }
  void run_class(int64_t its_class, void* workspace) const { run_group(its_class, 0, workspace); }

 private:
  // An item by cell: a cell of one part of one plane. Planes are numbered position by position.
  struct Turn {
    int32_t plane, part, cell;
  };

  void cut_parts(int64_t bands);  // into cells
  void order_cells(int64_t bands);
  // How many planes begin together.
  int64_t wave() const;
  size_t kernel_bytes() const;     // the workspace of a kernel
  int64_t gradient_bytes() const;  // of query, key and value
  void run_cell(const Problem& p, const BackwardArgs& args, const Plane& plane, int64_t part,
                const Cell& cell, const BackwardSums& sums, void* workspace,
                const Plane* next = nullptr) const;
  // next: the plane after it; null: not known.
  void run_plane(const BackwardArgs& args, const Plane& plane, const Plane* next,
                 const BackwardSums& memory, void* workspace) const;
  void run_group(int64_t its_class, int64_t group, void* workspace) const;
  void run_turn(const Turn& turn, void* workspace);
  // Whether the cell is the last of its rows in this part of the keys.
  static bool ends_rows(const Cell& cell) { return cell.row_rank + 1 == cell.row_cells; }

  const Problem& p_;  // of the call
  const BackwardArgs& args_;
  const Stretch stretch_;
  const Kernels& kernels_;
  Grid grid_;
  TableSums tables_;
  Sharing sharing_;
  PlaneSums sums_;
  int64_t planes_, rows_, keys_;  // how many planes, and of one its rows and keys
  double plane_flops_;
  bool runs_kernels_;  // else only the gradient of the sinks is wanted
  MaskGroups groups_;
  bool by_class_ = false;
  int64_t most_keys_;  // of a call of the kernel

  std::vector<std::vector<Cell>> cells_;  // of each part
  std::vector<Turn> turns_;               // by cell: the items
  int64_t steps_ = 1;                     // and how many of them follow each other
  int32_t plane_cells_ = 0;               // how many of them are of one plane
  int64_t waiting_planes_ = 0;            // by cell: how many planes have memory for their sums
  char* memory_ = nullptr;                // [waiting_planes_, sums_.bytes()]
  PlaneProgress progress_;
};

}  // namespace qkv
