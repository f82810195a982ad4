// One problem of a backward pass: how it is split, and what its pieces do.
#pragma once

#include <algorithm>

#include "attention.h"
#include "common/workspace.h"
#include "dispatch/kernel_table.h"
#include "mask_groups.h"
#include "plan.h"
#include "sharing.h"

namespace qkv {

// Where the parts of planes are, of all tasks that leave any: what the splits of a plane make of
// grad_query and of sums over keys, until it is added up. The parts of all classes (sharing.h),
// task after task, would be a long array. It is cut into waves of as many bytes; a class belongs to
// the wave in which its parts begin. One wave runs after the other, in the same memory.
struct Waves {
  int64_t count = 1;
  int64_t bytes = 1;      // from one to the next
  int64_t positions = 1;  // rounds of each: as many as the task with the most positions has
  int64_t slots = 1;      // 2: rounds use them in turn, and need not wait for each other's end
  char* memory = nullptr;
};

// Two ways, with the same results. Either an item is a class: its planes one
// after the other, the splits of each likewise (of all classes, the planes of one
// group, see MaskGroups). Or there is a round for each position and wave, an item is
// one split of one plane, and the sums of grad_query for each split but the first
// wait in memory until all are there. Most problems share nothing: then a class
// is a plane, and a wave is one round.
class BackwardTask {
 public:
  BackwardTask(const Problem& problem, const BackwardArgs& args);

  // All planes, about.
  double flops() const { return double(planes_.count * sharing_.positions()) * planes_.flops; }
  // Chooses the way.
  void plan(const Team& team);
  // Of all classes, if parts wait in memory; and the rounds that one class takes.
  int64_t waiting_bytes() const { return by_class_ ? 0 : planes_.count * parts_bytes_; }
  int64_t waiting_items() const { return by_class_ ? 0 : planes_.count * splits_; }
  int64_t class_bytes() const { return by_class_ ? 0 : parts_bytes_; }
  int64_t positions() const { return by_class_ ? 1 : sharing_.positions(); }
  // Its parts begin at `first_byte` of all tasks'. `waves` stays the caller's.
  void join(const Waves& waves, int64_t first_byte) { waves_ = &waves, first_byte_ = first_byte; }
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
  // What one class does in one round.
  struct Turn {
    int64_t plane;  // -1: nothing
    Parts parts;
  };
  // `index` counts the classes of the round's wave.
  Turn turn(int64_t index, int64_t round) const;
  int64_t first_class(int64_t wave) const;
  int64_t wave_classes() const {  // at most
    return std::min(planes_.count, ceil_div(waves_->bytes, parts_bytes_));
  }
  int64_t rounds() const { return (waves_->count - 1) * waves_->positions + sharing_.positions(); }

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
  // Of all Parts of a plane. They are in the thread's workspace if by_class_, else where the waves
  // have them.
  int64_t parts_bytes_ = 0;
  const Waves* waves_ = nullptr;
  int64_t first_byte_ = 0;
};

}  // namespace qkv
