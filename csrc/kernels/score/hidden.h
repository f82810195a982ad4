// The keys that a tile sees of a block. What masks hide is not computed: padding, and whatever else
// a caller writes out as a mask, costs what its visible keys cost.
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

}  // namespace qkv::QKV_ISA
