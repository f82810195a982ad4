// Which planes of a backward pass add to the same elements of GradMask::each.
#pragma once

#include <algorithm>
#include <array>

#include "attention.h"
#include "stretch.h"

namespace qkv {

// A plane is one batch item and one key/value head. Two planes are in the same class if they add to
// the same elements of GradMask::each, which are those that differ only in dimensions over which
// one of these outputs broadcasts, or those that have one sum for the gradient of tables
// (table_sums.h). The position of a plane is its place within its class. So planes of one class
// must not run at the same time, and planes at the same position of different classes always may.
// Positions ascend with the number of the plane.
//
// All of it is about the planes of one stretch of batch items. Items of different sizes, whose
// stretches are others, may add to the same elements, too (between_items): then every item is a
// stretch of its own, with the same classes, and they take turns.
class Sharing {
 public:
  // If no planes add to the same elements, there are `classes` classes, where it is not 0: plane n
  // belongs to class n % classes.
  Sharing(const Problem& p, const BackwardArgs& args, const Stretch& stretch, int64_t classes = 0)
      : kv_heads_(p.kv_heads), rank_(p.batch_rank), sizes_(p.batch_sizes) {
    if (p.spans) sizes_[0] = stretch.count;
    for (int d = 0; d < rank_; ++d) {
      shared_[d] = broadcasts(args, [d](const Strides& s) { return s.batch[d] == 0; });
      (shared_[d] ? positions_ : classes_) *= sizes_[d];
    }
    shared_heads_ = within_groups(args);
    (shared_heads_ ? positions_ : classes_) *= kv_heads_;
    if (classes == 0 || positions_ > 1) return;
    in_turn_ = true;
    positions_ = classes_ / classes, classes_ = classes;
  }

  // Whether planes of one stretch add to the same elements.
  static bool between_planes(const Problem& p, const BackwardArgs& args, const Stretch& stretch) {
    return Sharing(p, args, stretch).positions_ > 1;
  }

  // Whether all batch items of a problem with spans add to the same elements.
  static bool between_items(const Problem& p, const BackwardArgs& args) {
    return p.spans && broadcasts(args, [](const Strides& s) { return s.batch[0] == 0; });
  }

  // Whether the rows of one position, in all heads of a group, add to the same elements. Planes of
  // a class take turns strip by strip of their rows, so such rows have to be of one strip.
  static bool within_groups(const BackwardArgs& args) {
    return broadcasts(args, [](const Strides& s) { return s.head == 0; });
  }

  int64_t classes() const { return classes_; }
  int64_t positions() const { return positions_; }
  // How many classes the heads of one batch item belong to.
  int64_t head_classes() const { return shared_heads_ ? 1 : kv_heads_; }
  // Whether every element of the gradient is a sum over all batch items, and over more than one
  // plane.
  bool sums_whole_batch() const {
    return classes_ == head_classes() && positions_ * head_classes() > kv_heads_;
  }

  // The number of a plane in the stretch: item * kv_heads + kv_head.
  int64_t plane(int64_t its_class, int64_t position) const {
    if (in_turn_) return position * classes_ + its_class;
    int64_t plane = 0, step = 1;
    const auto digit = [&](int64_t size, bool shared) {
      int64_t& from = shared ? position : its_class;
      plane += from % size * step;
      from /= size;
      step *= size;
    };
    digit(kv_heads_, shared_heads_);
    for (int d = rank_ - 1; d >= 0; --d) digit(sizes_[d], shared_[d]);
    return plane;
  }

 private:
  template <class F>
  static bool broadcasts(const BackwardArgs& args, F dimension_broadcasts) {
    return std::any_of(args.grad_masks.begin(), args.grad_masks.end(), [&](const GradMask& grad) {
      return grad.each.data && dimension_broadcasts(grad.each.strides);
    });
  }

  int64_t kv_heads_;
  int rank_;
  std::array<int64_t, kMaxBatchRank> sizes_;
  std::array<bool, kMaxBatchRank> shared_{};
  bool shared_heads_ = false;
  bool in_turn_ = false;  // whether planes of a class are as far apart as there are classes
  int64_t classes_ = 1, positions_ = 1;
};

}  // namespace qkv
