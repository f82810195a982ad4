#include "probe.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "dispatch/dispatch.h"
#include "dispatch/kernel_table.h"

namespace qkv {
namespace {

// The best of kSamples measurements counts, each of about kSampleSeconds: together half a second.
constexpr int kSamples = 8;
constexpr double kSampleSeconds = 0.06;

double seconds_now() {
  using std::chrono::steady_clock;
  return std::chrono::duration<double>(steady_clock::now().time_since_epoch()).count();
}

// Stores the result of a loop, so that the compiler cannot drop the loop.
void keep(double result) { [[maybe_unused]] volatile double kept = result; }

void check_threads(int num_threads) {
  if (num_threads < 1)
    throw std::invalid_argument("num_threads: expected at least 1, got " +
                                std::to_string(num_threads));
}

// The loop for products of `dtype` in `isa`.
const PeakLoop& find_loop(const std::string& isa, DType dtype) {
  for (const Implementation* supported : supported_implementations())
    if (isa == supported->name) return supported->kernels(dtype).peak;
  throw std::invalid_argument("isa: this CPU has no probe for '" + isa + "'");
}

// The iterations per second of all threads together.
double loop_rate(const PeakLoop& loop, int64_t iterations, int num_threads) {
  int threads = 1;  // the number that OpenMP gave, which may be fewer than asked for
  double sum = 0;
  const double start = seconds_now();
#pragma omp parallel num_threads(num_threads) reduction(+ : sum)
  {
#pragma omp single nowait
    threads = omp_get_num_threads();
    sum += loop.run(iterations);
  }
  keep(sum);
  return static_cast<double>(threads) * static_cast<double>(iterations) / (seconds_now() - start);
}

typedef uint64_t Vec __attribute__((vector_size(16)));

// Reads `count` vectors, but for a few at the end, in STREAMS places at a time: CPUs differ in how
// many places keep their memory busiest. Returns how many vectors it read.
template <size_t STREAMS>
size_t read_streams(const Vec* data, size_t count, uint64_t* total) {
  constexpr size_t kLine = 64 / sizeof(Vec);
  const size_t stream = count / STREAMS / kLine * kLine;
  Vec sum[kLine] = {};
  for (size_t i = 0; i < stream; i += kLine) {
#pragma GCC unroll 4
    for (size_t s = 0; s < STREAMS; ++s) {
#pragma GCC unroll 4
      for (size_t u = 0; u < kLine; ++u) sum[u] += data[s * stream + i + u];
    }
  }
  for (const Vec& s : sum) *total += s[0] + s[1];
  return stream * STREAMS;
}

}  // namespace

PeakRate probe_peak(const char* isa, DType dtype, int num_threads) {
  check_threads(num_threads);
  const PeakLoop& loop = find_loop(isa, dtype);
  loop_rate(loop, 1 << 20, num_threads);  // starts the threads, and lets the clock rise
  const double rate = loop_rate(loop, 1 << 20, num_threads);
  const auto iterations = static_cast<int64_t>(rate * kSampleSeconds / num_threads) + 1;
  double best = 0;
  for (int i = 0; i < kSamples; ++i)
    best = std::max(best, loop_rate(loop, iterations, num_threads));
  return {loop.instruction, best * loop.flops / 1e9};
}

double probe_read_bandwidth_gbs(int num_threads, size_t bytes) {
  check_threads(num_threads);
  const size_t count = bytes / sizeof(Vec);
  if (count / static_cast<size_t>(num_threads) < 256)
    throw std::invalid_argument("bytes: expected at least 4096 a thread, got " +
                                std::to_string(bytes));
  const std::unique_ptr<Vec[]> buffer(new Vec[count]);  // has no pages until it is written
  double best = 0;
  for (int sample = -1; sample < 2 * kSamples; ++sample) {
    uint64_t total = 0;
    size_t vectors_read = 0;
    const double start = seconds_now();
#pragma omp parallel num_threads(num_threads) reduction(+ : total, vectors_read)
    {
      const size_t share = count / static_cast<size_t>(omp_get_num_threads());
      Vec* own = buffer.get() + share * static_cast<size_t>(omp_get_thread_num());
      if (sample < 0)
        std::fill(own, own + share, Vec{1, 1});  // so pages lie near the thread that reads them
      else
        vectors_read =
            sample % 2 ? read_streams<4>(own, share, &total) : read_streams<1>(own, share, &total);
    }
    const double gigabytes = static_cast<double>(vectors_read * sizeof(Vec)) / 1e9;
    best = std::max(best, gigabytes / (seconds_now() - start));
    keep(static_cast<double>(total));
  }
  return best;
}

size_t uncached_bytes() {
  long cache = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  cache = sysconf(_SC_LEVEL3_CACHE_SIZE);  // 0 or -1 if it is not known
#endif
  return std::max(size_t{512} << 20, static_cast<size_t>(std::max(cache, 0L)) * 4);
}

}  // namespace qkv
