// The backward pass of one problem: how it is cut into work items, and what each item does.
//
// A plane is one batch item and one key/value head. Planes that add to the same elements of a
// mask's gradient form a class (sharing.h); where nothing is shared, every plane is a class of its
// own. The keys of a plane are cut into splits. The sum that one split makes for grad_query, and
// for sums over the keys, is a part, which is added up once all splits of the plane are done.
//
// The work can be ordered in two ways. Both give the same bits; plan() takes the faster one.
//   by class:  an item is a class (of a problem with mask groups, mask_groups.h, the planes of one
//              group in a class). It takes plane after plane and split after split, and its parts
//              are in its thread's workspace.
//   by round:  an item is one split of one plane. A round runs one plane of every class, so that no
//              two items write the same element at the same time. All splits but the first leave
//              their parts in memory, and later phases add them up in the order of the keys.
// Most problems share nothing. Then a class is a plane, and there is one round.
#pragma once

#include <algorithm>

#include "attention.h"
#include "common/workspace.h"
#include "dispatch/kernel_table.h"
#include "mask_groups.h"
#include "plan.h"
#include "sharing.h"

namespace qkv {

// The memory in which the parts wait, of all planes of all tasks that work by round. Laid out class
// after class and task after task, the parts would be one long array. It is cut into waves of equal
// size, and a class belongs to the wave in which its parts begin. One wave runs after the other, in
// the same memory, so that a large batch needs no more of it than one wave does.
struct Waves {
  int64_t count = 1;
  int64_t bytes = 1;      // of one wave
  int64_t positions = 1;  // rounds of one wave: the most positions (sharing.h) that a task has
  // How often the memory of a wave is there. With 2, rounds take turns between them, so that no
  // round waits until the last parts of the one before have been added up.
  int64_t slots = 1;
  char* memory = nullptr;  // [slots, bytes], and what the parts of the last class take beyond that
};

// A task is the backward pass of one job. Whoever runs it calls plan() with all the work of the
// call, then, if the task works by round, join() with the waves of all tasks, and then the items of
// its four phases: run, finish_rows, finish_heads, finish_mask.
class BackwardTask {
 public:
  BackwardTask(const Problem& problem, const BackwardArgs& args);

  // About how many floating-point operations all planes take.
  double flops() const { return double(planes_.count * sharing_.positions()) * planes_.flops; }
  // Chooses between the two orders of work, by class and by round.
  void plan(const Team& team);
  // Takes the order by class, whatever else there is to do.
  void plan_by_class();
  // Of all classes together: the bytes of parts that wait in memory and the items that leave them,
  // 0 by class. Of one class: the bytes of its parts, 0 by class, and the rounds it takes.
  int64_t waiting_bytes() const { return by_class_ ? 0 : planes_.count * parts_bytes_; }
  int64_t waiting_items() const { return by_class_ ? 0 : planes_.count * splits_; }
  int64_t class_bytes() const { return by_class_ ? 0 : parts_bytes_; }
  int64_t positions() const { return by_class_ ? 1 : sharing_.positions(); }
  // The parts of this task begin at `first_byte` of those of all tasks. `waves` stays the caller's.
  void join(const Waves& waves, int64_t first_byte) { waves_ = &waves, first_byte_ = first_byte; }
  size_t workspace_bytes() const;  // of a thread
  void take_memory(Arena& arena);

  // The phases, in their order; `index` counts the items of one. The first runs the kernel, the
  // others add up what it left.
  Items items() const;
  void run(int64_t index, int64_t round, void* workspace) const;
  Items row_items() const;  // an item completes grad_query of kGradRows rows of a plane
  void finish_rows(int64_t index, int64_t round) const;
  Items head_items() const;  // an item completes what wants_heads() names, for one plane
  void finish_heads(int64_t index, int64_t round) const;
  Items mask_items() const;  // an item adds up GradMask::each of one class, over its groups
  void finish_mask(int64_t index) const { groups_.add(index); }

  // All four phases of one class at once, for a task without mask groups that works by class.
  int64_t classes() const { return planes_.count; }
  bool has_groups() const { return groups_.count() > 1; }
  void run_class(int64_t its_class, void* workspace) const { run_group(its_class, 0, workspace); }

 private:
  // The parts of one plane, and the memory in which its grad_query is summed.
  struct Parts {
    char* sums;        // [G * L, D], the sum for grad_query so far, if has_sums()
    char* grad_query;  // [parts, G * L, D], of all splits but the first
    double* slopes;    // [splits, G], for grad_alibi_slopes
    std::array<double*, kMasks> mask_rows;  // [splits, G * L] each, for GradMask::queries
  };
  Parts take_parts(Arena& arena) const;
  // What one class does in one round: which of its planes runs, and where its parts are.
  struct Turn {
    int64_t plane;  // -1: the class has no turn in this round
    Parts parts;
  };
  // `index` counts the classes of the round's wave.
  Turn turn(int64_t index, int64_t round) const;
  int64_t first_class(int64_t wave) const;
  // The most classes that a wave has.
  int64_t wave_classes() const {
    return std::min(planes_.count, ceil_div(waves_->bytes, parts_bytes_));
  }
  int64_t rounds() const { return (waves_->count - 1) * waves_->positions + sharing_.positions(); }

  void run_group(int64_t its_class, int64_t group, void* workspace) const;
  void lay_out_parts();
  size_t kernel_workspace(int64_t keys) const;
  void run_split(const BackwardArgs& args, int64_t plane, const Parts& parts, int64_t split,
                 void* workspace) const;
  void finish_plane_rows(int64_t plane, const Parts& parts, int64_t begin, int64_t end) const;
  void finish_plane_heads(int64_t plane, const Parts& parts) const;

  bool wants_heads() const {
    return args_.grad_alibi_slopes.data || args_.grad_sinks.data ||
           std::any_of(args_.grad_masks.begin(), args_.grad_masks.end(),
                       [](const GradMask& grad) { return grad.queries.data; });
  }
  // Whether grad_query is summed in memory of its own, because its own dtype would round every sum.
  bool has_sums() const {
    return splits_ > 1 && args_.grad_query.data && p_.dtype != compute_type(p_.dtype);
  }
  // The items of finish_rows() for one plane.
  int64_t plane_row_items() const { return ceil_div(planes_.rows, kGradRows); }
  int64_t part_bytes() const;

  const Problem& p_;
  const BackwardArgs& args_;
  const Kernels& kernels_;
  Sharing sharing_;
  Planes planes_;  // the planes of one round: one for each class
  int64_t splits_, split_keys_ = 0;
  MaskGroups groups_;
  bool by_class_ = false;
  int64_t parts_ = 0;         // how many parts of grad_query wait for each plane; none by class
  int64_t kernel_bytes_ = 0;  // of a thread's workspace, for the kernel
  int64_t parts_bytes_ = 0;   // of the Parts of a plane: in the workspace by class, else in a wave
  const Waves* waves_ = nullptr;
  int64_t first_byte_ = 0;
};

}  // namespace qkv
