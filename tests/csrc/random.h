// Random numbers, and how many of them a test draws.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <vector>

namespace qkv::test {

// Whether loops are cut down: where each step is ten or more times slower (sanitizers, emulators),
// and in the quick layer of tests, which sets the environment variable QKV_QUICK_TESTS.
#if defined(__SANITIZE_ADDRESS__) || defined(QKV_QUICK_TESTS)
constexpr bool kQuick = true;
#else
inline const bool kQuick = std::getenv("QKV_QUICK_TESTS") != nullptr;
#endif

using Random = std::mt19937_64;

inline int64_t draw(Random& random, int64_t low, int64_t high) {  // low <= x <= high
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

template <class T>
T draw_from(Random& random, const std::vector<T>& choices) {
  return choices[draw(random, 0, int64_t(choices.size()) - 1)];
}

// Standard normal but for its tails, which end at 3.5: the sum of four uniform numbers, which is
// quick to draw. Tests draw a hundred million of them.
inline double draw_normal(Random& random) {
  const uint64_t bits = random();
  const double sum = double(bits & 0xFFFF) + double(bits >> 16 & 0xFFFF) +
                     double(bits >> 32 & 0xFFFF) + double(bits >> 48);
  return (sum - 2 * 0xFFFF) * (std::sqrt(3.0) / 0x10000);
}

}  // namespace qkv::test
