// Strided tensors in guarded memory.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <vector>

#include "attention.h"
#include "guarded_memory.h"
#include "random.h"
#include "reference/element.h"

namespace qkv::test {

using reference::Type;
using reference::type_of;
using Sizes = std::vector<int64_t>;  // [batch..., head, row, col], or strides in that order

inline Sizes dense_strides(const Sizes& sizes) {
  Sizes strides(sizes.size());
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0; step *= std::max<int64_t>(sizes[d], 1)) strides[d] = step;
  return strides;
}

// Strides of a tensor whose dimensions are in any order in memory, with gaps between elements and
// rows. With `may_repeat` some strides are 0, as in an expanded tensor.
inline Sizes random_strides(Random& random, const Sizes& sizes, bool may_repeat) {
  Sizes order(sizes.size()), strides(sizes.size());
  std::iota(order.rbegin(), order.rend(), 0);  // innermost first
  if (draw(random, 0, 1)) std::shuffle(order.begin(), order.end(), random);
  int64_t step = std::max<int64_t>(1, draw(random, -2, 3));
  for (int64_t d : order) {
    if (may_repeat && draw(random, 0, 7) == 0) continue;
    strides[d] = step;
    step = step * std::max<int64_t>(sizes[d], 1) + std::max<int64_t>(0, draw(random, -3, 3));
  }
  return strides;
}

// A tensor [batch..., head, row, col]. A default-constructed one is absent, and its data null.
class Tensor {
 public:
  Tensor() = default;
  Tensor(Type type, Sizes sizes, Sizes strides, bool at_front = false)
      : type_(type), sizes_(std::move(sizes)), strides_(std::move(strides)) {
    memory_ = std::make_unique<GuardedMemory>(bytes(), at_front);
  }

  explicit operator bool() const { return memory_ != nullptr; }
  void* data() const { return memory_ ? memory_->data() : nullptr; }
  void make_read_only() const {
    if (memory_) memory_->make_read_only();
  }

  Type type() const { return type_; }
  const Sizes& sizes() const { return sizes_; }
  const Sizes& own_strides() const { return strides_; }
  int64_t numel() const {
    return std::accumulate(sizes_.begin(), sizes_.end(), int64_t{1}, std::multiplies<>());
  }

  // Calls f(offset) for every element, in row-major order of the indices.
  template <class F>
  void for_each(F f) const {
    Sizes index(sizes_.size());
    int64_t offset = 0;
    for (int64_t n = numel(); n > 0; --n) {
      f(offset);
      for (size_t d = sizes_.size(); d-- > 0;) {
        offset += strides_[d];
        if (++index[d] < sizes_[d]) break;
        offset -= sizes_[d] * strides_[d];
        index[d] = 0;
      }
    }
  }

  int64_t offset(std::initializer_list<int64_t> index) const {
    return std::inner_product(index.begin(), index.end(), strides_.begin(), int64_t{0});
  }

  double get(int64_t offset) const { return reference::read(type_, data(), offset); }
  double get(std::initializer_list<int64_t> index) const { return get(offset(index)); }

  void set(int64_t offset, double x) { reference::write(type_, data(), offset, x); }
  void set(std::initializer_list<int64_t> index, double x) { set(offset(index), x); }

  template <class F>
  void fill(F next) {
    for_each([&](int64_t offset) { set(offset, next()); });
  }

  std::vector<double> values() const {
    std::vector<double> all;
    all.reserve(*this ? size_t(numel()) : 0);
    if (*this) for_each([&](int64_t offset) { all.push_back(get(offset)); });
    return all;
  }

  // A row-major copy of another type.
  Tensor dense(Type type) const {
    if (!*this) return {};
    Tensor copy(type, sizes_, dense_strides(sizes_));
    int64_t at = 0;
    for_each([&](int64_t offset) { copy.set(at++, get(offset)); });
    return copy;
  }

  int64_t element() const { return reference::size_of(type_); }  // bytes

  // Whether nothing but elements was written, neither in the gaps nor around the tensor.
  bool canaries_alive() const {
    if (!*this) return true;
    if (strides_ != dense_strides(sizes_))
      return wrote_only([this](const auto& own) { for_each(own); });
    return memory_->canaries_alive(
        [this](uint8_t* data) { std::fill_n(data, bytes(), GuardedMemory::kCanary); });
  }

  // The same of some of the elements, with whose offsets each_own(own) calls own.
  template <class Each>
  bool wrote_only(const Each& each_own) const {
    return memory_->canaries_alive([&](uint8_t* data) {
      each_own([&, size = element()](int64_t offset) {
        std::fill_n(data + offset * size, size, GuardedMemory::kCanary);
      });
    });
  }

  Strides strides() const {
    Strides s;
    const size_t rank = sizes_.size() - 3;
    std::copy_n(strides_.begin(), rank, s.batch.begin());
    s.head = strides_[rank], s.row = strides_[rank + 1], s.col = strides_[rank + 2];
    return s;
  }

  Input input() const { return *this ? Input{data(), strides()} : Input{}; }
  Output output() const { return *this ? Output{data(), strides()} : Output{}; }

 private:
  // The bytes from the first element to the end of the last.
  size_t bytes() const {
    if (numel() == 0) return 0;
    int64_t last = 0;
    for (size_t d = 0; d < sizes_.size(); ++d) last += (sizes_[d] - 1) * strides_[d];
    return (last + 1) * element();
  }

  Type type_ = Type::f32;
  Sizes sizes_, strides_;
  std::unique_ptr<GuardedMemory> memory_;
};

}  // namespace qkv::test
