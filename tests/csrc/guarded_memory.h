// Memory around which every read or write is noticed.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>
#include <vector>

namespace qkv::test {

inline size_t os_page() {
  static const auto bytes = size_t(sysconf(_SC_PAGESIZE));
  return bytes;
}

inline void protect(uint8_t* at, size_t bytes, int rights) {
  if (mprotect(at, bytes, rights)) throw std::runtime_error("mprotect");
}

// Whole pages of the operating system that may be read and written, between two that may not be
// touched. A mapping is kept for the next one of the same size, since a test makes thousands.
class Mapping {
 public:
  explicit Mapping(size_t bytes) : bytes_(bytes) {
    const std::lock_guard<std::mutex> lock(mutex());
    std::vector<uint8_t*>& free = unused()[bytes];
    if (!free.empty()) {
      begin_ = free.back();
      free.pop_back();
      return;
    }
    void* all = mmap(nullptr, bytes + 2 * os_page(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) throw std::bad_alloc();
    begin_ = static_cast<uint8_t*>(all) + os_page();
    protect(begin_, bytes_, PROT_READ | PROT_WRITE);
  }
  ~Mapping() {
    if (bytes_ > kMostKept) {
      munmap(begin_ - os_page(), bytes_ + 2 * os_page());
      return;
    }
    if (read_only_) protect(begin_, bytes_, PROT_READ | PROT_WRITE);
    const std::lock_guard<std::mutex> lock(mutex());
    unused()[bytes_].push_back(begin_);
  }
  Mapping(const Mapping&) = delete;

  uint8_t* begin() const { return begin_; }
  size_t bytes() const { return bytes_; }
  void make_read_only() {
    // Several threads may call a kernel with the same inputs, and all of them come here.
    if (!read_only_.exchange(true)) protect(begin_, bytes_, PROT_READ);
  }

 private:
  static constexpr size_t kMostKept = size_t{1} << 16;  // bytes; larger mappings are given back

  static std::map<size_t, std::vector<uint8_t*>>& unused() {
    static auto* all = new std::map<size_t, std::vector<uint8_t*>>;
    return *all;
  }
  static std::mutex& mutex() {
    static std::mutex m;
    return m;
  }

  size_t bytes_;
  uint8_t* begin_;
  std::atomic<bool> read_only_{false};
};

// Memory for one tensor. Its data lie against the page behind them, or with `at_front` against the
// page before them: one byte too far on that side crashes, sanitizer or not. On the other side
// there are canaries, bytes of a fixed value.
class GuardedMemory {
 public:
  GuardedMemory(size_t bytes, bool at_front)
      : mapping_(std::max<size_t>((bytes + os_page() - 1) / os_page(), 1) * os_page()),
        data_(at_front ? mapping_.begin() : mapping_.begin() + mapping_.bytes() - bytes) {
    std::memset(mapping_.begin(), kCanary, mapping_.bytes());
  }

  void* data() const { return data_; }
  void make_read_only() { mapping_.make_read_only(); }

  // Whether every byte still is a canary, but for the elements. clear(data) is called on a copy of
  // all bytes, and turns those of the elements back into canaries.
  template <class Clear>
  bool canaries_alive(Clear clear) const {
    std::vector<uint8_t> copy(mapping_.begin(), mapping_.begin() + mapping_.bytes());
    clear(copy.data() + (data_ - mapping_.begin()));
    return copy.front() == kCanary && !std::memcmp(copy.data(), copy.data() + 1, copy.size() - 1);
  }

  static constexpr uint8_t kCanary = 0xA5;

 private:
  Mapping mapping_;
  uint8_t* data_;
};

}  // namespace qkv::test
