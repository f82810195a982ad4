// Decides which weights dropout keeps, by Philox4x32-7 from J. Salmon, M. Moraes, R. Dror and D.
// Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC'11). A random number is a function of a
// counter and a seed (which the paper calls the key). The counter is made of head, query and key,
// so every weight has a number of its own, and whoever asks for it, in any order and again in the
// backward pass, gets the same one.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace qkv {

// The paper's constants. A round of Philox multiplies words 0 and 2 of the counter by the
// multipliers, and adds the Weyl constants (of the golden ratio, and of sqrt(3) - 1) to the key.
constexpr uint32_t kPhiloxMultiplier[] = {0xD2511F53, 0xCD9E8D57};
constexpr uint32_t kPhiloxWeyl[] = {0x9E3779B9, 0xBB67AE85};
// Seven rounds are the fewest that pass all of the paper's statistical tests (its ten are there for
// a margin), and FlashAttention drops by as many. Of dropout's cost they save a fourth.
constexpr int kPhiloxRounds = 7;

// A weight is kept if its random word is at least this threshold, which has probability 1 - p up to
// 2^-32.
inline uint32_t dropout_threshold(double p) {
  return uint32_t(std::min(std::round(p * 4294967296.0), 4294967295.0));
}

// The factor of the weights that are kept; 0 where none is.
inline double dropout_scale(double p) { return p < 1 ? 1 / (1 - p) : 0; }

// A counter makes the four words of eight neighbouring keys: key j has word j % 4, as it is if
// j % 8 < 4, and else with its halves exchanged. Either is a random word, so that its key is kept
// with probability 1 - p. The two keys of a word are not quite independent: the upper half decides,
// which is another one for each, unless it equals the threshold's, and then the other key's does.
// So the covariance of the two is at most 2^-17: with x and y the halves of the threshold over
// 2^16, it is 2^-15 (min(x, y) - x y), and at most 2^-32 more. One Philox for eight keys in place
// of four halves most of dropout's cost.
constexpr int64_t kPhiloxKeys = 8;

// A counter has 32 bits for the query, and 32 for its eight keys. In a problem of more queries or
// keys than this, some of them would share their random numbers, so such a problem has to be
// refused.
constexpr int64_t kMaxDropoutQueries = int64_t{1} << 32, kMaxDropoutKeys = int64_t{1} << 35;

}  // namespace qkv
