// Rotations (rotation.h): blocks of positions, and what the backward pass adds up of them.
#include "rotation.h"

#include <algorithm>

#include "common/half.h"
#include "dispatch/kernel_table.h"
#include "pass.h"

namespace qkv {
namespace {

// About what a number of query or key takes, in multiply-adds of attention's: a rotation waits for
// memory, so it is more than the arithmetic.
constexpr double kFlopsOfNumber = 8;

// Adds up parts [B, n, size] in their order, elements [begin, end) of each. `to` gets [B..., size],
// rows of `columns` numbers; where it has a batch stride of 0, those of that dimension are one sum.
template <class T>
void add_up(const Rotation& r, T* parts, int64_t n, int64_t size, const TypedOutput& to,
            int64_t columns, int64_t begin, int64_t end) {
  Strides sums;  // where the first item of the same sum is: its parts become the sum
  for (int64_t d = r.batch_rank, step = n * size; d-- > 0; step *= r.batch_sizes[d])
    sums.batch[d] = to.strides.batch[d] == 0 ? 0 : step;
  for (int64_t b = 0; b < r.batch(); ++b) {
    T* const first = parts + batch_offset(r, sums, b);
    const T* const own = parts + b * n * size;
    for (int64_t k = own == first ? 1 : 0; k < n; ++k)
      for (int64_t i = begin; i < end; ++i) first[i] += own[k * size + i];
  }
  const bool none = r.batch() * n == 0;  // then no part is there to be read, and the sum is 0
  Rotation summed = r;
  for (int d = 0; d < r.batch_rank; ++d)
    if (to.strides.batch[d] == 0) summed.batch_sizes[d] = 1;
  with_type(to.dtype, [&](auto e) {
    using E = decltype(e);
    for (int64_t b = 0; b < summed.batch(); ++b) {
      const T* const sum = parts + batch_offset(summed, sums, b);
      E* const out = static_cast<E*>(to.data) + batch_offset(summed, to.strides, b);
      for (int64_t i = begin; i < end; ++i)
        out[i / columns * to.strides.row + i % columns * to.strides.col] =
            narrow<E>(Compute<E>(none ? T(0) : sum[i]));
    }
  });
}

// The only job of its Pass.
class RotationTask {
 public:
  RotationTask(const Rotation& r, const RotationGradients* gradients)
      : r_(r),
        gradients_(gradients),
        kernels_(active_kernels(r.dtype)),
        blocks_(ceil_div(r.seqlen, kRotationBlock)),
        items_(r.batch() * blocks_) {}

  double flops() const {
    const double heads = double(r_.tensors[0].heads + r_.tensors[1].heads);
    const double numbers = double(r_.seqlen) * double(r_.head_dim) * heads * double(r_.batch());
    return kFlopsOfNumber * numbers * (gradients_ ? 2 : 1);
  }
  void plan(const Team&) const {}
  size_t workspace_bytes() const { return items_ ? kernels_.rotate(r_, item(0), nullptr) : 0; }
  void take_memory(Arena& arena) {
    for (size_t t = 0; gradients_ && t < 2; ++t) {
      if (wants_tables()) tables_[t] = arena.take<char>(r_.batch() * r_.seqlen * table_row());
      if (gradients_->grad_weight[t].data) weights_[t] = arena.take<double>(items_ * r_.head_dim);
    }
  }

  Items items() const { return {items_, flops() / double(items_)}; }
  void run(int64_t index, void* workspace) const { kernels_.rotate(r_, item(index), workspace); }
  Items last_items() const {
    if (!gradients_) return {};
    const int64_t of_weights = 2 * ceil_div(r_.head_dim, kNumbers);
    return {table_items() + of_weights, double(items_ * kNumbers)};
  }
  void finish(int64_t index) const {
    if (index < table_items()) return add_tables(index * kRotationBlock);
    const int64_t t = (index - table_items()) % 2, n = (index - table_items()) / 2 * kNumbers;
    const TypedOutput& to = gradients_->grad_weight[t];
    if (to.data)
      add_up(r_, weights_[t], blocks_, r_.head_dim, to, r_.head_dim, n,
             std::min(r_.head_dim, n + kNumbers));
  }

 private:
  bool wants_tables() const { return gradients_ && gradients_->wants_tables(); }
  int64_t table_row() const { return r_.rotary_pairs * size_of(compute_type(r_.dtype)); }

  RotationItem item(int64_t index) const {
    RotationItem item{index / blocks_, index % blocks_ * kRotationBlock, 0, gradients_};
    item.end = std::min(r_.seqlen, item.begin + kRotationBlock);
    const int64_t row = item.batch * r_.seqlen + item.begin;
    for (size_t t = 0; t < 2; ++t) {
      if (wants_tables()) (t ? item.sin_sums : item.cos_sums) = tables_[t] + row * table_row();
      if (weights_[t]) item.weight_sums[t] = weights_[t] + index * r_.head_dim;
    }
    return item;
  }

  // An item of the second phase is a block of positions of both tables, or so many numbers of a
  // weight.
  static constexpr int64_t kNumbers = 16;
  int64_t table_items() const { return wants_tables() ? blocks_ : 0; }
  void add_tables(int64_t first) const {
    const int64_t columns = r_.rotary_pairs, begin = first * columns;
    const int64_t end = std::min(r_.seqlen, first + kRotationBlock) * columns;
    for (int t = 0; t < 2; ++t) {
      const TypedOutput& to = t ? gradients_->grad_sin : gradients_->grad_cos;
      with_type(compute_type(r_.dtype), [&](auto e) {
        using T = Compute<decltype(e)>;
        if (to.data)
          add_up(r_, reinterpret_cast<T*>(tables_[t]), 1, r_.seqlen * columns, to, columns, begin,
                 end);
      });
    }
  }

  const Rotation& r_;
  const RotationGradients* const gradients_;
  const Kernels& kernels_;
  const int64_t blocks_, items_;
  std::array<char*, 2> tables_{};     // [B, L, R / 2] of cos and of sin
  std::array<double*, 2> weights_{};  // [B, blocks, D]
};

void rotate(const Rotation& rotation, const RotationGradients* gradients) {
  Pass<RotationTask> pass(1, rotation.num_threads);
  pass.add(rotation, gradients);
  pass.run();
}

}  // namespace

void rotation_forward(const Rotation& rotation) { rotate(rotation, nullptr); }

void rotation_backward(const Rotation& rotation, const RotationGradients& gradients) {
  rotate(rotation, &gradients);
}

}  // namespace qkv
