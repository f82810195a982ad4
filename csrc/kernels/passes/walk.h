// The walk of a pass over the keys of an item, block after block, and the keys that a tile sees of
// a block. What masks hide is not computed: padding, and whatever else a caller writes out as a
// mask, costs what its visible keys cost.
#pragma once

#include "kernels/operands/tile.h"

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

// Calls attend(state, key, keys) for each block of `keys` and each of the tiles in states [count]
// that sees some of its keys: those are [key, key + keys), from a multiple of kKeyMultiple on. The
// loop over keys is outside and the loop over tiles inside, so that a block is read from memory
// once and serves every tile: load(key, keys, last) is called before the first tile that sees some
// of it, where `last` is the end of all keys that any tile sees. Blocks begin at multiples of
// `step` from the first key of the item, whatever the tiles see.
template <class T, int64_t kKeyMultiple, class State, class Load, class Attend>
QKV_INLINE void for_each_block(const Problem& p, State* states, int64_t count, const Range& keys,
                               int64_t step, const Load& load, const Attend& attend) {
  const Range all = keys_of_tiles(states, count);
  const int64_t last = std::min(keys.end, all.end);
  const int64_t skipped = std::max<int64_t>(0, all.begin - keys.begin) / step * step;
  for (int64_t key = keys.begin + skipped; key < last; key += step) {
    const int64_t block = std::min(step, last - key);
    bool is_loaded = false;
    for (int64_t t = 0; t < count; ++t) {
      const Range seen = keys_seen<kKeyMultiple>(p, states[t].tile, key, block);
      if (seen.is_empty()) continue;
      if (!is_loaded) load(key, block, last);
      is_loaded = true;
      attend(states[t], seen.begin, seen.end - seen.begin);
    }
  }
}

}  // namespace qkv::QKV_ISA
