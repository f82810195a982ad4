// Decides which weights dropout keeps, by Philox4x32-10 from J. Salmon, M. Moraes, R. Dror and D.
// Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC'11). A random number is a function of a
// counter and a seed (which the paper calls the key). The counter is made of head, query and key,
// so every weight has a number of its own, and whoever asks for it, in any order and again in the
// backward pass, gets the same one.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

namespace qkv {

// The paper's constants. A round of Philox multiplies words 0 and 2 of the counter by the
// multipliers, and adds the Weyl constants (of the golden ratio, and of sqrt(3) - 1) to the key.
constexpr uint32_t kPhiloxMultiplier[] = {0xD2511F53, 0xCD9E8D57};
constexpr uint32_t kPhiloxWeyl[] = {0x9E3779B9, 0xBB67AE85};
constexpr int kPhiloxRounds = 10;

inline std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter,
                                      std::array<uint32_t, 2> key) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t first = uint64_t{kPhiloxMultiplier[0]} * counter[0];
    const uint64_t second = uint64_t{kPhiloxMultiplier[1]} * counter[2];
    counter = {uint32_t(second >> 32) ^ counter[1] ^ key[0], uint32_t(second),
               uint32_t(first >> 32) ^ counter[3] ^ key[1], uint32_t(first)};
    key = {key[0] + kPhiloxWeyl[0], key[1] + kPhiloxWeyl[1]};
  }
  return counter;
}

// A weight is kept if its random word is at least this threshold, which has probability 1 - p up to
// 2^-32.
inline uint32_t dropout_threshold(double p) {
  return uint32_t(std::min(std::round(p * 4294967296.0), 4294967295.0));
}

// The factor of the weights that are kept; 0 where none is.
inline double dropout_scale(double p) { return p < 1 ? 1 / (1 - p) : 0; }

// A counter has 32 bits for the query, and 32 for the four neighbouring keys whose words it makes.
// In a problem of more queries or keys than this, some of them would share their random numbers, so
// such a problem has to be refused.
constexpr int64_t kMaxDropoutQueries = int64_t{1} << 32, kMaxDropoutKeys = int64_t{1} << 34;

// Whether one weight is kept. `head` counts the query heads of all batch items: batch * H + head.
inline bool kept(uint64_t seed, uint32_t threshold, int64_t head, int64_t query, int64_t key) {
  const auto words =
      philox({uint32_t(key / 4), uint32_t(query), uint32_t(head), uint32_t(head >> 32)},
             {uint32_t(seed), uint32_t(seed >> 32)});
  return words[key % 4] >= threshold;
}

}  // namespace qkv
