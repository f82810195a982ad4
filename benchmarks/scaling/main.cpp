// Predicts how calls scale to many cores, from what their items cost on one core of this machine.
//
//   qkv_scaling [--threads 1,2,16,64] [--repeats 3] [--check N] [--counted] [shape ...]
//
// prints a line for each shape, pass and number of threads: what the items cost and how long the
// call would take, in milliseconds, and the share of the threads' time that would not be lost,
// measured against the same call on one thread. --check N times the call on N real threads as well;
// --counted counts operations (counted.h) instead of milliseconds, a million as one.
#include <omp.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>

#include "counted.h"
#include "dispatch/dispatch.h"
#include "shapes.h"
#include "simulator.h"

namespace qkv::scaling {
namespace {

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The median of what `f` takes.
template <class F>
double time_of(int times, const F& f) {
  std::vector<double> found;
  for (int n = 0; n < times; ++n) {
    const double begin = seconds();
    f();
    found.push_back(seconds() - begin);
  }
  std::nth_element(found.begin(), found.begin() + times / 2, found.end());
  return found[size_t(times / 2)];
}

// What two threads of this machine cost. Their region and their barrier are taken for what each
// doubling of the threads costs.
Overheads measure_overheads() {
  const auto region = [](int64_t items, bool twice) {
    const Phase phase{[=](int64_t) { return Items{items, 1e9}; }, [](const Item&) {}, true};
    twice ? parallel_phases({2, 2}, 1, {phase, phase}) : parallel_phases({2, 2}, 1, {phase});
  };
  constexpr int kTimes = 1001, kMany = 2000;
  const double one = time_of(kTimes, [&] { region(2, false); });
  const double two = time_of(kTimes, [&] { region(2, true); });
  const double many = time_of(101, [&] { region(kMany, false); });
  return {one, std::max(0., two - one), std::max(0., many - one) / (kMany / 2.)};
}

struct Options {
  std::vector<int> threads = {1, 2, 4, 8, 16, 32, 64, 96, 128, 192};
  int repeats = 3, check = 0;
  bool is_counted = false;
  std::vector<Named> shapes;
};

std::vector<int> integers(const char* text) {
  std::vector<int> found;
  std::stringstream stream(text);
  for (std::string number; std::getline(stream, number, ',');) found.push_back(std::stoi(number));
  return found;
}

Options parse(int argc, char** argv) {
  Options options;
  for (int n = 1; n < argc; ++n) {
    const auto value = [&] {
      if (n + 1 == argc) throw std::invalid_argument(std::string(argv[n]) + " needs a value");
      return argv[++n];
    };
    if (!std::strcmp(argv[n], "--threads")) {
      options.threads = integers(value());
    } else if (!std::strcmp(argv[n], "--repeats")) {
      options.repeats = std::stoi(value());
    } else if (!std::strcmp(argv[n], "--check")) {
      options.check = std::stoi(value());
    } else if (!std::strcmp(argv[n], "--counted")) {
      options.is_counted = true, options.repeats = 1;
    } else {
      Named shape{argv[n], argv[n]};
      for (const Named& named : kGrid)
        if (!std::strcmp(named.name, argv[n])) shape = named;
      options.shapes.push_back(shape);
    }
  }
  if (options.shapes.empty()) options.shapes.assign(std::begin(kGrid), std::end(kGrid));
  return options;
}

void predict(const Named& shape, const Options& options, const Overheads& overheads) {
  const Call call(shape.shape);
  call.forward(1);
  Simulator simulator(options.is_counted ? [] { return 1e-9 * counted(); } : seconds, overheads);
  for (const bool forward : {true, false}) {
    const auto run = [&](int threads) { forward ? call.forward(threads) : call.backward(threads); };
    for (const int threads : options.threads) {
      const double alone = simulator.observe([&] { run(1); }, options.repeats).work;
      const auto r = simulator.observe([&] { run(threads); }, options.repeats);
      std::printf("%-8s %-8s %4d threads %6lld items  work %9.3f  time %9.3f  efficiency %.3f\n",
                  shape.name, forward ? "forward" : "backward", threads, (long long)r.items,
                  1e3 * r.work, 1e3 * r.duration, alone / (threads * r.duration));
      if (threads == options.check)
        std::printf("%-8s %-8s %4d threads measured %31.3f\n", shape.name,
                    forward ? "forward" : "backward", threads,
                    1e3 * time_of(2 * options.repeats + 1, [&] { run(threads); }));
      std::fflush(stdout);
    }
  }
}

int main_of(int argc, char** argv) {
  const Options options = parse(argc, argv);
  if (options.check) omp_set_num_threads(options.check);
  if (options.is_counted) {
    add_counted();
    set_isa("counted");
    for (const Named& shape : options.shapes) predict(shape, options, {});
    return 0;
  }
  const Overheads overheads = measure_overheads();
  std::printf("region %.1f us, barrier %.1f us, fetch %.3f us\n", 1e6 * overheads.region,
              1e6 * overheads.barrier, 1e6 * overheads.fetch);
  for (const Named& shape : options.shapes) predict(shape, options, overheads);
  return 0;
}

}  // namespace
}  // namespace qkv::scaling

int main(int argc, char** argv) {
  try {
    return qkv::scaling::main_of(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
