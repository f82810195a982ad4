// What a simulator sees of a call: its phases, instead of threads that run them, and which item
// waits for which. For benchmarks/scaling and tests; there is none otherwise.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace qkv {

struct Phase;
struct Threads;

class Observer {
 public:
  virtual ~Observer() = default;
  // Takes the place of parallel_phases, and must run every item, those of a phase in the order of
  // their WorkList.
  virtual void run(const Threads& threads, int64_t jobs, std::initializer_list<Phase> phases) = 0;
  // The item that runs waits until `number` is at least `least`, or has just made it `value`.
  virtual void waits(const void* number, int32_t least) = 0;
  virtual void advances(const void* number, int32_t value) = 0;
};

// Of all calls of the process, which must not overlap while it is set.
inline Observer* observer = nullptr;

}  // namespace qkv
