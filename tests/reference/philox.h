// Philox4x32-7, one counter at a time (common/philox.h).
#pragma once

#include <array>

#include "common/philox.h"

namespace qkv {

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

// Whether one weight is kept. `head` counts the query heads of all batch items: batch * H + head.
inline bool kept(uint64_t seed, uint32_t threshold, int64_t head, int64_t query, int64_t key) {
  const auto words =
      philox({uint32_t(key / 8), uint32_t(query), uint32_t(head), uint32_t(head >> 32)},
             {uint32_t(seed), uint32_t(seed >> 32)});
  const uint32_t word = words[key % 4];
  return (key % 8 < 4 ? word : word >> 16 | word << 16) >= threshold;
}

}  // namespace qkv
