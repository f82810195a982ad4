#include "allocations.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<int64_t> count{0}, largest{0};

}  // namespace

#if !defined(QKV_SANITIZER_ALLOCATES)
void* operator new(size_t bytes) {
  ++count;
  if (void* p = std::malloc(bytes ? bytes : 1)) return p;
  throw std::bad_alloc();
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }

void* operator new(size_t bytes, std::align_val_t alignment) {
  ++count;
  const auto size = int64_t(bytes);
  for (int64_t seen = largest; size > seen && !largest.compare_exchange_weak(seen, size);) {
  }
  const size_t line = size_t(alignment);
  if (void* p = std::aligned_alloc(line, (bytes + line - 1) / line * line)) return p;
  throw std::bad_alloc();
}
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
#endif

namespace qkv::test {

int64_t allocations() { return count; }
int64_t largest_workspace() { return largest.exchange(0); }

}  // namespace qkv::test
