// The gradient of a small mask to which many planes add. Planes of one class (sharing.h) must take
// turns, and such a mask would keep most threads waiting. So the positions of every class are
// divided into groups, each with sums of its own: planes of different groups run at the same
// time, and at the end the sums of the groups are added in their order.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "attention.h"
#include "common/strides.h"
#include "common/workspace.h"
#include "sharing.h"
#include "threads/parallel.h"

namespace qkv {

class MaskGroups {
 public:
  // Decides how many groups there are; `cuts_planes` says whether more than two threads can work on
  // one plane, so that its cells are items enough (two are not, where planes of few classes wait
  // for each other). There is one group only where more are of no use, where their memory would
  // matter, where two masks have such a gradient, and where it is not a sum over the batch: the
  // number of groups follows the number of planes, and no result but a sum over the batch may
  // depend on the batch size.
  MaskGroups(const Problem& p, const BackwardArgs& args, const Sharing& sharing, bool cuts_planes)
      : p_(p), args_(args), sharing_(sharing) {
    int wanted = 0;
    for (int m = 0; m < kMasks; ++m)
      if (args.grad_masks[m].each.data) mask_ = m, ++wanted;
    // Planes of one class, in different groups, would add to the same sum of tables.
    if (wanted != 1 || args.grad_tables || !sharing.sums_whole_batch()) return;
    const Strides& strides = sums_of(args).strides;
    element_ = p.dtype == DType::f64 ? sizeof(double) : sizeof(float);
    class_heads_ = strides.head ? p.group() : 1;
    strides_.col = 1;
    strides_.row = p.seqlen_k;
    int64_t step = p.seqlen_q * p.seqlen_k;
    const auto dense = [&](int64_t size, int64_t stride) {
      const int64_t at = stride ? step : 0;
      if (stride) step *= size;
      return at;
    };
    strides_.head = dense(p.heads, strides.head);
    for (int d = p.batch_rank - 1; d >= 0; --d)
      strides_.batch[d] = dense(p.batch_sizes[d], strides.batch[d]);
    group_elements_ = step;

    const int64_t most = 1 + kMaxBytes / std::max<int64_t>(1, step * element_);
    const int64_t groups =
        std::min({most, ceil_div(kItems, sharing.classes()), sharing.positions()});
    if (!cuts_planes || groups * sharing.classes() >= kFewestItems) count_ = groups;
  }

  int64_t count() const { return count_; }
  void take_memory(Arena& arena) {
    group_args_.assign(count_ - 1, args_);
    for (BackwardArgs& args : group_args_)
      args.grad_masks[mask_].each = {arena.take<char>(group_elements_ * element_), strides_};
  }

  // The arguments for the planes of one group. clear() sets the group's sums to 0, and must be
  // called before the first plane of a class runs.
  const BackwardArgs& args(int64_t group) const { return group ? group_args_[group - 1] : args_; }
  void clear(int64_t group, int64_t its_class) const {
    if (group == 0) return;
    char* const sums = static_cast<char*>(sums_of(group_args_[group - 1]).data);
    std::memset(sums + offset(its_class) * element_, 0,
                size_t(class_heads_ * p_.seqlen_q * p_.seqlen_k * element_));
  }
  // Adds the sums of all groups, of one class, to GradMask::each.
  void add(int64_t its_class) const {
    p_.dtype == DType::f64 ? add_as<double>(its_class) : add_as<float>(its_class);
  }

 private:
  // An item is one group of one class. As many groups are made as give kItems items, where memory
  // permits. If they would give fewer than kFewestItems and planes are cut, there is one group, and
  // the cells of planes are the items.
  static constexpr int64_t kItems = 64, kFewestItems = 16;
  // The most bytes that the sums of all groups but the first take. Where a mask is larger, one
  // plane alone has work enough for the threads.
  static constexpr int64_t kMaxBytes = int64_t(2) << 20;

  template <class T>
  void add_as(int64_t its_class) const {
    const int64_t plane_index = sharing_.plane(its_class, 0), from = offset(its_class);
    const Strides& s = sums_of(args_).strides;
    for (int64_t h = 0; h < class_heads_; ++h) {
      T* const to = plane<T>(p_, sums_of(args_), plane_index / p_.kv_heads,
                             plane_index % p_.kv_heads * p_.group() + h);
      for (const BackwardArgs& group : group_args_) {
        const T* sum = static_cast<const T*>(sums_of(group).data) + from + h * strides_.head;
        for (int64_t i = 0; i < p_.seqlen_q; ++i)
          for (int64_t j = 0; j < p_.seqlen_k; ++j) to[i * s.row + j * s.col] += *sum++;
      }
    }
  }

  const Output& sums_of(const BackwardArgs& args) const { return args.grad_masks[mask_].each; }
  // Where the sums of one class begin among those of a group, in elements.
  int64_t offset(int64_t its_class) const {
    const int64_t plane = sharing_.plane(its_class, 0);
    return plane_offset(p_, strides_, plane / p_.kv_heads, plane % p_.kv_heads * p_.group());
  }

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
