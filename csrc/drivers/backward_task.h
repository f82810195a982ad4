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

// Where the parts of all planes wait in memory, of all tasks that work by round. Laid out class
// after class and task after task, the parts would be one long array. It is cut into waves of equal
// size, and a class belongs to the wave in which its parts begin. One wave runs after the other, in
// the same memory, so that a large batch needs no more of it than one wave does.
struct Waves {
  int64_t count = 1;
  int64_t bytes = 1;      // of one wave
  int64_t positions = 1;  // rounds of one wave: the most positions (sharing.h) that a task has
  int64_t slots = 1;      // 2: rounds take turns between two, so none waits for another's last item
  char* memory = nullptr;
};

// One problem: first plan() with all the work of the call, then, if it works by round, join() with
// the waves of all tasks, then the items of four phases: run, finish_rows, finish_heads,
// finish_mask.
class BackwardTask {
 public:
  BackwardTask(const Problem& problem, const BackwardArgs& args);

  // About how many floating-point operations all planes take.
  double flops() const { return double(planes_.count * sharing_.positions()) * planes_.flops; }
  // Chooses between "by class" and "by round".
  void plan(const Team& team);
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
  Items row_items() const;  // grad_query of some rows
  void finish_rows(int64_t index, int64_t round) const;
  Items head_items() const;  // what there is one of for each head, or each of its queries
  void finish_heads(int64_t index, int64_t round) const;
  Items mask_items() const;  // grad_mask of a class
  void finish_mask(int64_t index) const { groups_.add(index); }

 private:
  // What the splits of one plane leave to be added up: its parts.
  struct Parts {
    char* sums;         // of grad_query, [G * L, D], if has_sums()
    char* grad_query;   // [parts, G * L, D]
    double* slopes;     // [splits, G]
    double* mask_rows;  // [splits, G * L]
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
  // Whether grad_query is summed in memory of its own, because its own dtype would round every sum.
  bool has_sums() const {
    return splits_ > 1 && args_.grad_query.data && p_.dtype != compute_type(p_.dtype);
  }
  int64_t row_blocks() const { return ceil_div(planes_.rows, kGradRows); }
  int64_t part_bytes() const;

  const Problem& p_;
  const BackwardArgs& args_;
  const Kernels& kernels_;
  Sharing sharing_;
  Planes planes_;  // those of one round: one for each class
  int64_t splits_, split_keys_ = 0;
  MaskGroups groups_;
  bool by_class_ = false;
  int64_t parts_ = 0;         // parts of grad_query that one plane leaves
  int64_t kernel_bytes_ = 0;  // what the kernel needs of a thread's workspace
  int64_t parts_bytes_ = 0;   // all Parts of a plane: in the workspace by class, else in a wave
  const Waves* waves_ = nullptr;
  int64_t first_byte_ = 0;
};

}  // namespace qkv
