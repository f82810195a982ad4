// Items that wait for each other: numbers that one thread counts up and others wait for.
//
// An item may wait for items before it in the list of its job, and only for these: threads take
// items in the order of the list, so whatever an item waits for is done, or some thread has it, and
// the first one that is not done has nothing to wait for.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "threads/observer.h"

namespace qkv {

using Number = std::atomic<int32_t>;

// How often a thread looks before it lets others run. A look takes 40 (Zen 3) to 140 cycles, so
// that is 25 to 90 us, in which most items that are waited for end if there is a core for every
// thread. Where there is none, the thread that is waited for may need the core of the one that
// waits.
constexpr int kLooks = 2000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until the number is at least so large. What the thread that made it so has written before
// is then visible.
inline void wait_for(const Number& number, int32_t least) {
  if (observer) observer->waits(&number, least);
  for (int looks = 0; number.load(std::memory_order_acquire) < least; ++looks)
    looks < kLooks ? pause() : std::this_thread::yield();
}

// For one thread at a time; `value` is larger than what the number was.
inline void advance(Number& number, int32_t value) {
  number.store(value, std::memory_order_release);
  if (observer) observer->advances(&number, value);
}

// For any thread at any time: adds 1, and returns the sum.
inline int32_t add_one(Number& number) {
  const int32_t sum = number.fetch_add(1, std::memory_order_acq_rel) + 1;
  if (observer) observer->advances(&number, sum);
  return sum;
}

}  // namespace qkv
