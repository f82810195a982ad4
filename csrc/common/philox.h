// Which weights dropout keeps. Philox4x32-10, from J. Salmon, M. Moraes, R. Dror
// and D. Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC'11): a random
// number is a function of a counter and a key, so every pair of a query and a key
// has its own, whoever asks, in any order, and again in the backward pass.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

namespace qkv {

// A round multiplies words 0 and 2 by these ...
constexpr uint32_t kPhiloxMultiplier[] = {0xD2511F53, 0xCD9E8D57};
// ... and adds these to the key (golden ratio, sqrt(3) - 1).
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

// A weight is kept if its word reaches this: with probability 1 - p, to 2^-32.
inline uint32_t dropout_threshold(double p) {
  return uint32_t(std::min(std::round(p * 4294967296.0), 4294967295.0));
}

// What kept weights are multiplied by.
inline double dropout_scale(double p) { return p < 1 ? 1 / (1 - p) : 0; }

// A counter has 32 bits for the query, and as many for four neighbouring keys that it serves. In a
// problem of more than this, some queries or keys would share their numbers: it has to be refused.
constexpr int64_t kMaxDropoutQueries = int64_t{1} << 32, kMaxDropoutKeys = int64_t{1} << 34;

// plane: batch * H + query head.
inline bool kept(uint64_t seed, uint32_t threshold, int64_t plane, int64_t query, int64_t key) {
  const auto words =
      philox({uint32_t(key / 4), uint32_t(query), uint32_t(plane), uint32_t(plane >> 32)},
             {uint32_t(seed), uint32_t(seed >> 32)});
  return words[key % 4] >= threshold;
}

}  // namespace qkv
