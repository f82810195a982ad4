// Which planes of a backward pass add to the same elements of GradMask::each.
#pragma once

#include <algorithm>

#include "attention.h"

namespace qkv {

// A plane is one batch item and one key/value head. Two planes are in the same class if they add to
// the same elements of GradMask::each, which are those that differ only in dimensions over which
// one of these outputs broadcasts. The position of a plane is its place within its
// class. So planes of one class must not run at the same time, and planes at the same position of
// different classes always may. Positions ascend with the flat index of the plane.
class Sharing {
 public:
  Sharing(const Problem& p, const BackwardArgs& args) : p_(p) {
    for (int d = 0; d < p.batch_rank; ++d) {
      shared_[d] = broadcasts(args, [d](const Strides& s) { return s.batch[d] == 0; });
      (shared_[d] ? positions_ : classes_) *= p.batch_sizes[d];
    }
    shared_heads_ = broadcasts(args, [](const Strides& s) { return s.head == 0; });
    (shared_heads_ ? positions_ : classes_) *= p.kv_heads;
  }

  int64_t classes() const { return classes_; }
  int64_t positions() const { return positions_; }
  // How many classes the heads of one batch item belong to.
  int64_t head_classes() const { return shared_heads_ ? 1 : p_.kv_heads; }
  // Whether every element of the gradient is a sum over all batch items, and over more than one
  // plane.
  bool sums_whole_batch() const {
    return classes_ == head_classes() && positions_ * head_classes() > p_.kv_heads;
  }

  // The flat index, batch * kv_heads + kv_head, of a plane.
  int64_t plane(int64_t its_class, int64_t position) const {
    int64_t plane = 0, step = 1;
    const auto digit = [&](int64_t size, bool shared) {
      int64_t& from = shared ? position : its_class;
      plane += from % size * step;
      from /= size;
      step *= size;
    };
    digit(p_.kv_heads, shared_heads_);
    for (int d = p_.batch_rank - 1; d >= 0; --d) digit(p_.batch_sizes[d], shared_[d]);
    return plane;
  }

 private:
  template <class F>
  static bool broadcasts(const BackwardArgs& args, F dimension_broadcasts) {
    return std::any_of(args.grad_masks.begin(), args.grad_masks.end(), [&](const GradMask& grad) {
      return grad.each.data && dimension_broadcasts(grad.each.strides);
    });
  }

  const Problem& p_;
  bool shared_[kMaxBatchRank], shared_heads_ = false;
  int64_t classes_ = 1, positions_ = 1;
};

}  // namespace qkv
