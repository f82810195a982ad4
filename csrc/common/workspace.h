// Scratch memory, carved from one allocation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>

namespace qkv {

constexpr size_t kCacheLine = 64;

// Hands out arrays from the front of a buffer, each aligned to a cache line. An arena built on
// nullptr only counts: whoever runs the same code on it first learns how large the buffer must be.
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

  // Behind the last array there is room for two vectors that begin within it: what rounds rows to
  // bf16 reads whole pairs of vectors (narrow_rows in pairs.h), and uses nothing beyond its row.
  size_t used() const { return used_ + 2 * kCacheLine; }

 private:
  uintptr_t base_;
  size_t used_ = 0;
};

// The bytes of workspace that a thread keeps from call to call, once it has made a small call: a
// few rows in one thread take 5 to 480 KiB, by instruction set, type and pass, for head dimensions
// up to 128 (f64 takes the most). malloc serves such sizes by merging and splitting free memory:
// malloc_consolidate and _int_free had 5 % of the samples of a call on 1x1x1x8 (Intel with
// AVX-512), and have 3 % since the workspace is kept. A larger workspace is allocated for its call,
// and freed.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kKeptBytes = 0;  // so that AddressSanitizer sees what is written beyond the end
#else
constexpr size_t kKeptBytes = size_t(512) << 10;
#endif

// Uninitialised, cache-line aligned memory, for the length of a call.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : is_small_(bytes <= kKeptBytes) {
    if (is_small_)
      data_ = std::move(kept());  // null in a thread's first call, and while another call has it
    if (!data_) data_.reset(::operator new(is_small_ ? kKeptBytes : bytes, kAlignment));
  }
  ~Buffer() {
    if (is_small_) kept() = std::move(data_);
  }
  Buffer(const Buffer&) = delete;

  void* data() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{kCacheLine};
  struct Delete {
    void operator()(void* p) const { ::operator delete(p, kAlignment); }
  };
  using Memory = std::unique_ptr<void, Delete>;

  static Memory& kept() {
    thread_local Memory memory;
    return memory;
  }

  bool is_small_;
  Memory data_;
};

}  // namespace qkv
