// The gradient of a small mask to which many planes add. Planes of one class (sharing.h) must take
// turns, and such a mask would keep most threads waiting. So the positions of every class are
// divided into groups, each with sums of its own: planes of different groups run at the same
// time, and at the end the sums of the groups are added in their order.
#pragma once

#include <vector>

#include "attention.h"
#include "common/workspace.h"
#include "sharing.h"

namespace qkv {

class MaskGroups {
 public:
  // Decides how many groups there are; `splits_keys` says whether the keys of a plane are split.
  // There is one group only where more are of no use, where their memory would matter, where two
  // masks have such a gradient, and where it is not a sum over the batch: the number of groups
  // follows the number of planes, and no result but a sum over the batch may depend on the batch
  // size.
  MaskGroups(const Problem& problem, const BackwardArgs& args, const Sharing& sharing,
             bool splits_keys);

  int64_t count() const { return count_; }
  void take_memory(Arena& arena);

  // The arguments for the planes of one group. clear() sets the group's sums to 0, and must be
  // called before the first plane of a class runs.
  const BackwardArgs& args(int64_t group) const { return group ? group_args_[group - 1] : args_; }
  void clear(int64_t group, int64_t its_class) const;
  // Adds the sums of all groups, of one class, to GradMask::each.
  void add(int64_t its_class) const;

 private:
  template <class T>
  void add_as(int64_t its_class) const;
  const Output& sums_of(const BackwardArgs& args) const { return args.grad_masks[mask_].each; }
  // Where the sums of one class begin among those of a group, in elements.
  int64_t offset(int64_t its_class) const;

  const Problem& p_;
  const BackwardArgs& args_;
  const Sharing sharing_;
  int64_t count_ = 1;
  int mask_ = 0;                // whose gradient it is
  int64_t element_ = 0;         // bytes of an element of it
  int64_t class_heads_ = 0;     // how many heads of a plane have sums of their own
  Strides strides_;             // of the sums of a group, which are dense
  int64_t group_elements_ = 0;  // elements of the sums of a group, all classes
  std::vector<BackwardArgs>
      group_args_;  // of all groups but the first, which adds to GradMask::each
};

}  // namespace qkv
