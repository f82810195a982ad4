// How long a call would take on more cores than this machine has.
//
// The simulator takes the place of the threads of a call (threads/observer.h). It is given the real
// phases with their real items, as they are cut for so many threads, runs them one after the other,
// and notes what each one costs and which one waits for which. From that it works out when each of
// the threads would fetch which run, and when the last one would be done.
//
// It knows nothing of what threads do to each other: shared caches, memory bandwidth, cores that
// slow down when all of them work.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "threads/observer.h"
#include "threads/parallel.h"

namespace qkv::scaling {

// What threads cost beside the items, in the unit of the clock.
struct Overheads {
  double region = 0;   // to wake the threads of a region and to wait for the last, per doubling
  double barrier = 0;  // between two phases, per doubling of the threads
  double fetch = 0;    // of a run
};

class Simulator : public Observer {
 public:
  // `clock` is read before and after each item: seconds, or anything else that adds up.
  explicit Simulator(std::function<double()> clock, Overheads overheads = {})
      : clock_(std::move(clock)), overheads_(overheads) {}

  // What `call` costs when it is run `repeats` times, each item as long as the shortest of its
  // runs. `call` must be the same each time.
  struct Result {
    int threads = 1;  // that the call worked with
    int64_t items = 0;
    double work = 0;      // of all items
    double duration = 0;  // on the threads
  };
  Result observe(const std::function<void()>& call, int repeats = 1);

  void run(const Threads& threads, int64_t jobs, std::initializer_list<Phase> phases) override;
  void waits(const void* number, int32_t least) override;
  void advances(const void* number, int32_t value) override;

 private:
  struct Wait {
    const void* number;
    int32_t least;
  };
  struct Advance {
    const void* number;
    int32_t value;
    double after;  // the item has begun
  };
  struct Step {
    double cost = 0;
    std::vector<Wait> waits;
    std::vector<Advance> advances;
  };
  using Run = std::vector<Step>;
  struct Record {
    std::vector<Run> runs;
    bool one_run_a_thread, wait;
  };

  void record(const Phase& phase, int64_t jobs);
  void take_shortest(const std::vector<Record>& others);
  Result simulate() const;

  std::function<double()> clock_;
  Overheads overheads_;
  int working_ = 1;
  std::vector<Record> records_;
  Step* step_ = nullptr;  // the item that runs
  double began_ = 0;
};

}  // namespace qkv::scaling
