#include "probe.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace qkv {
namespace {

constexpr int kSamples = 8;
constexpr double kSampleSeconds = 0.06;
// Two pipes times the longest latency of a fused multiply-add (5 cycles), or of
// a multiply and an add on four pipes (6 cycles), and two constants still fit
// into 16 registers.
constexpr int kChains = 12;

double seconds_now() {
  using std::chrono::steady_clock;
  return std::chrono::duration<double>(steady_clock::now().time_since_epoch()).count();
}

// What a loop leaves behind, so that the compiler cannot drop it.
volatile double sink;

// kChains independent chains a = a * x + y, which settle at 2: never denormal,
// never infinite. x and y are read from volatiles: the compiler may not know them.
// One body for every instruction set; a function of its own for each, because
// a target attribute only reaches the code inside its function.
#define QKV_DEFINE_MULTIPLY_ADD_LOOP(name, target_attribute, vector_bytes)                 \
  template <typename T>                                                                    \
  target_attribute void name(int64_t iterations) {                                         \
    typedef T Vec __attribute__((vector_size(vector_bytes)));                              \
    volatile T half = 0.5, one = 1;                                                        \
    const Vec x = Vec{} + half, y = Vec{} + one;                                           \
    Vec a0 = y, a1 = y, a2 = y, a3 = y, a4 = y, a5 = y;                                    \
    Vec a6 = y, a7 = y, a8 = y, a9 = y, a10 = y, a11 = y;                                  \
    for (int64_t i = 0; i < iterations; ++i) {                                             \
      a0 = a0 * x + y, a1 = a1 * x + y, a2 = a2 * x + y, a3 = a3 * x + y;                  \
      a4 = a4 * x + y, a5 = a5 * x + y, a6 = a6 * x + y, a7 = a7 * x + y;                  \
      a8 = a8 * x + y, a9 = a9 * x + y, a10 = a10 * x + y, a11 = a11 * x + y;              \
      /* Equal chains must not be merged into one. */                                      \
      asm volatile(""                                                                      \
                   : QKV_KEEP(a0), QKV_KEEP(a1), QKV_KEEP(a2), QKV_KEEP(a3), QKV_KEEP(a4), \
                     QKV_KEEP(a5), QKV_KEEP(a6), QKV_KEEP(a7), QKV_KEEP(a8), QKV_KEEP(a9), \
                     QKV_KEEP(a10), QKV_KEEP(a11));                                        \
    }                                                                                      \
    const Vec sum = a0 + a1 + a2 + a3 + a4 + a5 + a6 + a7 + a8 + a9 + a10 + a11;           \
    sink = sum[0];                                                                         \
  }

#if defined(__x86_64__)
#define QKV_KEEP(vec) "+v"(vec)  // any vector register
QKV_DEFINE_MULTIPLY_ADD_LOOP(loop_avx512, __attribute__((target("avx512f"))), 64)
QKV_DEFINE_MULTIPLY_ADD_LOOP(loop_avx2, __attribute__((target("avx2,fma"))), 32)
#elif defined(__aarch64__)
#define QKV_KEEP(vec) "+w"(vec)
#else
#error "name this architecture's vector register constraint"
#endif
QKV_DEFINE_MULTIPLY_ADD_LOOP(loop_generic, , 16)

struct MultiplyAddLoop {
  const char* isa;
  int vector_bytes;
  void (*f32)(int64_t);
  void (*f64)(int64_t);
};

constexpr MultiplyAddLoop kLoops[] = {
#if defined(__x86_64__)
    {"avx512", 64, loop_avx512<float>, loop_avx512<double>},
    {"avx2", 32, loop_avx2<float>, loop_avx2<double>},
#endif
    {"generic", 16, loop_generic<float>, loop_generic<double>},
};

const MultiplyAddLoop& find_loop(const char* isa) {
  const std::string wanted = isa;
  for (const char* supported : supported_isas()) {
    if (wanted != supported) continue;
    for (const MultiplyAddLoop& loop : kLoops) {
      if (wanted == loop.isa) return loop;
    }
  }
  throw std::invalid_argument("isa: this CPU has no probe for '" + wanted + "'");
}

void check_threads(int num_threads) {
  if (num_threads < 1) {
    throw std::invalid_argument("num_threads: expected at least 1, got " +
                                std::to_string(num_threads));
  }
}

// Iterations per second, all threads' together.
double loop_rate(void (*loop)(int64_t), int64_t iterations, int num_threads) {
  int threads = 1;  // as many as OpenMP really gave
  const double start = seconds_now();
#pragma omp parallel num_threads(num_threads)
  {
#pragma omp single nowait
    threads = omp_get_num_threads();
    loop(iterations);
  }
  return static_cast<double>(threads) * static_cast<double>(iterations) / (seconds_now() - start);
}

}  // namespace

double probe_fma_gflops(const char* isa, DType dtype, int num_threads) {
  check_threads(num_threads);
  const MultiplyAddLoop& found = find_loop(isa);
  void (*loop)(int64_t) = dtype == DType::f32 ? found.f32 : found.f64;
  loop_rate(loop, 1 << 20, num_threads);  // threads up, clocks up
  const double rate = loop_rate(loop, 1 << 20, num_threads);
  const auto iterations = static_cast<int64_t>(rate * kSampleSeconds / num_threads) + 1;
  double best = 0;
  for (int i = 0; i < kSamples; ++i) {
    best = std::max(best, loop_rate(loop, iterations, num_threads));
  }
  const int lanes = found.vector_bytes / (dtype == DType::f32 ? 4 : 8);
  return best * kChains * lanes * 2 / 1e9;
}

double probe_read_bandwidth_gbs(int num_threads, size_t bytes) {
  check_threads(num_threads);
  typedef uint64_t Vec __attribute__((vector_size(16)));
  constexpr size_t kUnroll = 8;
  const size_t count = bytes / sizeof(Vec);
  if (count / static_cast<size_t>(num_threads) < 256) {
    throw std::invalid_argument("bytes: expected at least 4096 a thread, got " +
                                std::to_string(bytes));
  }
  const std::unique_ptr<Vec[]> buffer(new Vec[count]);  // not touched yet
  double best = 0;
  for (int sample = -1; sample < kSamples; ++sample) {
    uint64_t total = 0;
    size_t vectors_read = 0;
    const double start = seconds_now();
#pragma omp parallel num_threads(num_threads) reduction(+ : total, vectors_read)
    {
      const auto threads = static_cast<size_t>(omp_get_num_threads());
      const size_t share = count / threads / kUnroll * kUnroll;
      Vec* part = buffer.get() + share * static_cast<size_t>(omp_get_thread_num());
      if (sample < 0) {
        std::fill(part, part + share, Vec{1, 1});  // pages come to the thread that reads them
      } else {
        Vec sum[kUnroll] = {};
        for (size_t i = 0; i < share; i += kUnroll) {
#pragma GCC unroll 8
          for (size_t u = 0; u < kUnroll; ++u) sum[u] += part[i + u];
        }
        for (const Vec& s : sum) total += s[0] + s[1];
        vectors_read = share;
      }
    }
    const double gigabytes = static_cast<double>(vectors_read * sizeof(Vec)) / 1e9;
    best = std::max(best, gigabytes / (seconds_now() - start));
    sink = static_cast<double>(total);
  }
  return best;
}

size_t uncached_bytes() {
  long cache = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  cache = sysconf(_SC_LEVEL3_CACHE_SIZE);  // 0 or -1: not known
#endif
  return std::max(size_t{512} << 20, static_cast<size_t>(std::max(cache, 0L)) * 4);
}

}  // namespace qkv
