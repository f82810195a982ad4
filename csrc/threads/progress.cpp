#include "progress.h"

#include <thread>

#include "observer.h"

namespace qkv {
namespace {

// How often a thread looks before it lets others run. A look takes 40 (Zen 3) to 140 cycles, so
// that is 25 to 90 us, in which most items that are waited for end if there is a core for every
// thread. Where there is none, the thread that is waited for may need the core of the one that
// waits.
constexpr int kLooks = 2000;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void wait_for(const Number& number, int32_t least) {
  if (observer) observer->waits(&number, least);
  for (int looks = 0; number.load(std::memory_order_acquire) < least; ++looks)
    looks < kLooks ? pause() : std::this_thread::yield();
}

void advance(Number& number, int32_t value) {
  number.store(value, std::memory_order_release);
  if (observer) observer->advances(&number, value);
}

int32_t add_one(Number& number) {
  const int32_t sum = number.fetch_add(1, std::memory_order_acq_rel) + 1;
  if (observer) observer->advances(&number, sum);
  return sum;
}

}  // namespace qkv
