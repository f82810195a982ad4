// The walk of a pass over the keys of an item, block after block, and the keys that a tile sees of
// a block. What masks hide is not computed: padding, and whatever else a caller writes out as a
// mask, costs what its visible keys cost.
#pragma once

#include "kernels/operands/operands.h"

namespace qkv::QKV_ISA {

// Those of keys [key, key + keys) that rows of the tile see, or a range around them that begins a
// multiple of kMultiple after `key`, where an operand may begin; empty where positions or masks
// hide all of them.
template <int64_t kMultiple>
Range keys_seen(const Problem& p, const Tile& tile, int64_t key, int64_t keys) {
  Range seen{std::max(key, tile.key_begin), std::min(key + keys, tile.key_end)};
  if (p.maps && !seen.is_empty()) seen = keys_shown(p, tile.map_view(), seen);
  if (!seen.is_empty()) seen.begin -= (seen.begin - key) % kMultiple;
  return seen;
}

// A gap of at least this many hidden keys is left out of a block. What it saves, two products of 16
// keys, 32 rows and D = 64 in f32, takes about 1 us at the peak of a Zen 4; what it costs, to read
// and write the tile's output once more, was reckoned to take a fraction of that.
constexpr int64_t kGap = 16;

// Calls attend(begin, count) for each range of keys of the block [key, key + keys) that the tile
// sees: what keys_seen returns, without the gaps that masks leave in it.
template <int64_t kMultiple, class Attend>
void for_each_range_seen(const Problem& p, const Tile& tile, int64_t key, int64_t keys,
                         const Attend& attend) {
  const int64_t end = key + keys;
  Range range{end, end};
  const auto finish = [&] {
    if (range.is_empty()) return;
    range.begin -= (range.begin - key) % kMultiple;
    attend(range.begin, range.end - range.begin);
  };
  for (int64_t at = key; at < end; at = (at / kMapKeys + 1) * kMapKeys) {
    const int64_t square_end = std::min(end, (at / kMapKeys + 1) * kMapKeys);
    const Range seen = keys_seen<1>(p, tile, at, square_end - at);
    if (seen.is_empty()) continue;
    if (seen.begin - range.end >= std::max(kGap, kMultiple)) finish(), range = seen;
    range = {std::min(range.begin, seen.begin), seen.end};
  }
  finish();
}

// Calls attend(state, key, keys) for each block of `keys` and each of the tiles in states [count]
// that sees some of its keys: those are [key, key + keys), from a multiple of kKeyMultiple on, or
// several such ranges, where masks leave gaps between them. The loop over keys is outside and the
// loop over tiles inside, so that a block is read from memory once and serves every tile: load(key,
// keys, last) is called before the first tile that sees some of it, where `last` is the end of all
// keys that any tile sees. Blocks begin at multiples of `step` from the first key of the item,
// whatever the tiles see.
template <int64_t kKeyMultiple, class State, class Load, class Attend>
QKV_INLINE void for_each_block(const Problem& p, State* states, int64_t count, const Range& keys,
                               int64_t step, const Load& load, const Attend& attend) {
  // Where bits are fixed, chains of additions begin at the same keys whatever a tile sees.
  constexpr int64_t kMultiple = kFixedBits ? kSumChain : kKeyMultiple;
  const Range all = keys_of_tiles(states, count);
  const int64_t last = std::min(keys.end, all.end);
  const int64_t skipped = std::max<int64_t>(0, all.begin - keys.begin) / step * step;
  for (int64_t key = keys.begin + skipped; key < last; key += step) {
    const int64_t block = std::min(step, last - key);
    bool is_loaded = false;
    for (int64_t t = 0; t < count; ++t) {
      const auto attend_range = [&](int64_t begin, int64_t seen) {
        if (!is_loaded) load(key, block, last);
        is_loaded = true;
        attend(states[t], begin, seen);
      };
      if (p.maps) {
        for_each_range_seen<kMultiple>(p, states[t].tile, key, block, attend_range);
        continue;
      }
      const Range seen = keys_seen<kMultiple>(p, states[t].tile, key, block);
      if (!seen.is_empty()) attend_range(seen.begin, seen.end - seen.begin);
    }
  }
}

}  // namespace qkv::QKV_ISA
