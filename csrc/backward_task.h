// One problem of a backward pass: how it is split, and what its pieces do.
#pragma once

#include <algorithm>

#include "attention.h"
#include "isa/implementation.h"
#include "mask_groups.h"
#include "plan.h"
#include "sharing.h"
#include "workspace.h"

namespace qkv {

// Two ways, with the same results. Either an item is a class: its planes one
// after the other, the splits of each likewise (of all classes, the planes of one
// group, see MaskGroups). Or there is a round for each position, an item is one
// split of one plane, and the sums of grad_query for each split but the first
// wait in memory until all are there. Most problems share nothing: then a class
// is a plane, and there is one round.
class BackwardTask {
 public:
  BackwardTask(const Problem& problem, const BackwardArgs& args);

  // All planes, about.
  double flops() const { return double(planes_.count * sharing_.positions()) * planes_.flops; }
  // Chooses the way.
  void plan(const Team& team);
  size_t workspace_bytes() const;  // of a thread
  void take_memory(Arena& arena);

  // What runs first, and what waits for it. `index` counts the items.
  Items items() const;
  void run(int64_t index, int64_t round, void* workspace) const;
  Items row_items() const;  // grad_query of some rows
  void finish_rows(int64_t index, int64_t round) const;
  Items head_items() const;  // what there is one of for each head, or each of its queries
  void finish_heads(int64_t index, int64_t round) const;
  Items mask_items() const;  // grad_mask of a class
  void finish_mask(int64_t index) const { groups_.add(index); }

 private:
  // What the splits of one plane leave to be added up.
  struct Parts {
    char* sums;         // of grad_query, [G * L, D], if has_sums()
    char* grad_query;   // [parts, G * L, D]
    double* slopes;     // [splits, G]
    double* mask_rows;  // [splits, G * L]
  };
  Parts take_parts(Arena& arena) const;
  // Of the plane that a class has in a round. There are two for each class, used
  // in turn: one round may begin before all rows of the last are finished.
  Parts parts_of(int64_t its_class, int64_t round) const {
    Arena arena(memory_ + (round % 2 * planes_.count + its_class) * parts_bytes_);
    return take_parts(arena);
  }

  void run_class(int64_t index, char* workspace) const;
  void run_split(const BackwardArgs& args, int64_t plane, const Parts& parts, int64_t split,
                 void* workspace) const;
  void finish_plane_rows(int64_t plane, const Parts& parts, int64_t begin, int64_t end) const;
  void finish_plane_heads(int64_t plane, const Parts& parts) const;

  bool wants_heads() const {
    return args_.grad_alibi_slopes.data || args_.grad_mask_queries.data || args_.grad_sinks.data;
  }
  // Whether grad_query is summed elsewhere, since its own type would round every sum.
  bool has_sums() const {
    return splits_ > 1 && args_.grad_query.data && p_.dtype != compute_type(p_.dtype);
  }
  int64_t row_blocks() const { return ceil_div(planes_.rows, kGradRows); }
  int64_t part_bytes() const;

  const Problem& p_;
  const BackwardArgs& args_;
  const Kernels& kernels_;
  Sharing sharing_;
  Planes planes_;  // of one round
  int64_t splits_, split_keys_ = 0;
  MaskGroups groups_;
  bool by_class_ = false;
  int64_t parts_ = 0;         // of grad_query
  int64_t kernel_bytes_ = 0;  // of the workspace, for the kernel
  int64_t parts_bytes_ = 0;   // of all Parts of a plane
  char* memory_ = nullptr;    // unless by_class_: then they are in the thread's workspace
};

}  // namespace qkv
