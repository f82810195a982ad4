// Scratch memory, carved from one allocation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace qkv {

constexpr size_t kCacheLine = 64;

// Hands out cache-line aligned arrays from the front of a buffer. One built on
// nullptr only counts: run the same code on it to learn the size needed.
class Arena {
 public:
  explicit Arena(void* base) : base_(reinterpret_cast<uintptr_t>(base)) {}

  bool counting() const { return base_ == 0; }

  template <class T>
  T* take(int64_t count) {
    T* at = reinterpret_cast<T*>(base_ + used_);
    used_ += (size_t(count) * sizeof(T) + kCacheLine - 1) / kCacheLine * kCacheLine;
    return at;
  }

  size_t used() const { return used_; }

 private:
  uintptr_t base_;
  size_t used_ = 0;
};

// An uninitialised, cache-line aligned allocation.
class Buffer {
 public:
  explicit Buffer(size_t bytes)
      : data_(::operator new(bytes ? bytes : 1, std::align_val_t(kCacheLine))) {}

  void* data() const { return data_.get(); }

 private:
  struct Delete {
    void operator()(void* p) const { ::operator delete(p, std::align_val_t(kCacheLine)); }
  };
  std::unique_ptr<void, Delete> data_;
};

}  // namespace qkv
