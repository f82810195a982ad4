// Small masks shared by many planes: the planes are divided into groups, each
// sums a grad_mask of its own, and these are added in order, so that no plane has
// to wait for another group's.
#pragma once

#include <vector>

#include "attention.h"
#include "common/workspace.h"
#include "sharing.h"

namespace qkv {

class MaskGroups {
 public:
  // One group where there is no use for more, or where their memory would matter,
  // and where grad_mask is not a sum over the batch, so that no result but such
  // sums depends on the batch size.
  MaskGroups(const Problem& problem, const BackwardArgs& args, const Sharing& sharing,
             bool splits_keys);

  int64_t count() const { return count_; }
  void take_memory(Arena& arena);

  // The arguments for planes of a group, whose sums must be cleared before the
  // first plane of a class.
  const BackwardArgs& args(int64_t group) const { return group ? group_args_[group - 1] : args_; }
  void clear(int64_t group, int64_t its_class) const;
  // Adds the groups' sums of one class to grad_mask.
  void add(int64_t its_class) const;

 private:
  template <class T>
  void add_as(int64_t its_class) const;
  // Where the sums of one class begin in a group's, in elements.
  int64_t offset(int64_t its_class) const;

  const Problem& p_;
  const BackwardArgs& args_;
  const Sharing sharing_;
  int64_t count_ = 1;
  int64_t element_ = 0, class_heads_ = 0;  // heads of a plane that do not share
  Strides strides_;                        // of a group's sums: dense
  int64_t group_elements_ = 0;             // of all classes
  std::vector<BackwardArgs> group_args_;   // of all groups but the first
};

}  // namespace qkv
