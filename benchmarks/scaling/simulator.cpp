#include "simulator.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace qkv::scaling {
namespace {

// When the numbers of a phase reached their values.
class Numbers {
 public:
  double time_of(const void* number, int32_t least) const {
    const auto found = of_.find(number);
    if (found == of_.end()) return 0;
    for (const auto& [value, time] : found->second)
      if (value >= least) return time;
    return 0;
  }
  // A number never has a value earlier than a smaller one.
  void set(const void* number, int32_t value, double time) {
    auto& values = of_[number];
    if (!values.empty()) time = std::max(time, values.back().second);
    values.emplace_back(value, time);
  }

 private:
  std::map<const void*, std::vector<std::pair<int32_t, double>>> of_;
};

}  // namespace

Simulator::Result Simulator::observe(const std::function<void()>& call, int repeats) {
  observer = this;
  std::vector<Record> shortest;
  for (int n = 0; n < repeats; ++n) {
    records_.clear();
    call();
    if (n > 0) take_shortest(shortest);
    shortest = records_;
  }
  observer = nullptr;
  return simulate();
}

void Simulator::take_shortest(const std::vector<Record>& others) {
  for (size_t r = 0; r < records_.size(); ++r)
    for (size_t run = 0; run < records_[r].runs.size(); ++run)
      for (size_t i = 0; i < records_[r].runs[run].size(); ++i) {
        Step& step = records_[r].runs[run][i];
        const Step& other = others[r].runs[run][i];
        if (other.cost < step.cost) step.cost = other.cost, step.advances = other.advances;
      }
}

void Simulator::run(const Threads& threads, int64_t jobs, std::initializer_list<Phase> phases) {
  working_ = threads.working;
  for (const Phase& phase : phases) record(phase, jobs);
}

void Simulator::record(const Phase& phase, int64_t jobs) {
  std::vector<Items> items;
  for (int64_t job = 0; job < jobs; ++job) items.push_back(phase.items(job));
  const WorkList list(items, working_);
  Record& record = records_.emplace_back();
  record.one_run_a_thread = list.one_run_a_thread(), record.wait = phase.wait;
  for (int64_t r = 0; r < list.runs(); ++r) {
    Run& run = record.runs.emplace_back();
    list.for_each_item(r, [&](int64_t job, int64_t index) {
      step_ = &run.emplace_back();
      began_ = clock_();
      phase.run({job, index, 0});
      step_->cost = clock_() - began_;
    });
  }
  step_ = nullptr;
}

void Simulator::waits(const void* number, int32_t least) {
  if (step_) step_->waits.push_back({number, least});
}

void Simulator::advances(const void* number, int32_t value) {
  if (step_) step_->advances.push_back({number, value, clock_() - began_});
}

Simulator::Result Simulator::simulate() const {
  Result result;
  result.threads = working_;
  std::vector<double> free_at(size_t(working_), 0.);
  const double doublings = std::log2(double(working_));
  for (const Record& record : records_) {
    Numbers numbers;
    for (size_t r = 0; r < record.runs.size(); ++r) {
      const auto thread = record.one_run_a_thread
                              ? free_at.begin() + int64_t(r % size_t(working_))
                              : std::min_element(free_at.begin(), free_at.end());
      double now = *thread + overheads_.fetch;
      for (const Step& step : record.runs[r]) {
        for (const Wait& wait : step.waits)
          now = std::max(now, numbers.time_of(wait.number, wait.least));
        for (const Advance& of : step.advances) numbers.set(of.number, of.value, now + of.after);
        now += step.cost;
        result.work += step.cost;
        ++result.items;
      }
      *thread = now;
    }
    if (!record.wait) continue;
    const double all = *std::max_element(free_at.begin(), free_at.end());
    std::fill(free_at.begin(), free_at.end(), all + overheads_.barrier * doublings);
  }
  result.duration =
      *std::max_element(free_at.begin(), free_at.end()) + overheads_.region * doublings;
  return result;
}

}  // namespace qkv::scaling
