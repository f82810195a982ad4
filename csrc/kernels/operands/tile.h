// A tile: up to kTileRows<T> rows of a plane, one in each lane, against some of its keys.
#pragma once

#include "kernels/gemm/gemm.h"
#include "kernels/simd/vec.h"

namespace qkv::QKV_ISA {

template <class T>
constexpr int kTileRows = 2 * kLanes<T>;

// How many keys a product takes at once: those of a full micro-kernel, or of two tiles of AMX. A
// block of keys is a multiple of this, since a remainder costs as much as a whole step.
constexpr int kKeyStep = kProductRows;

// The most keys of a tile. They are so many that reading and writing the output once for each tile
// is cheap, and so few that the tile's scores stay in the first-level cache beside the operands.
// Without AMX they are also no more than one chain of additions takes (kLongestChain).
constexpr int kKeyBlock = kFixedBits ? kFixedKeys
                          : kTiles   ? 128 / kKeyStep * kKeyStep
                                     : kLongestChain / kKeyStep * kKeyStep;

// `keys` keys are cut into blocks of equal size: this many keys each, a multiple of kKeyStep. Where
// bits are fixed, blocks do not follow from how many keys there are.
inline int64_t key_step(int64_t keys) {
  if (kFixedBits) return kFixedKeys;
  const int64_t blocks = std::max<int64_t>(1, (keys + kKeyBlock - 1) / kKeyBlock);
  const int64_t steps = (keys + blocks * kKeyStep - 1) / (blocks * kKeyStep);
  return std::max<int64_t>(1, steps) * kKeyStep;
}

struct Tile {
  Plane plane;
  int64_t row;    // the row in the first lane
  int rows;       // how many lanes have a row
  int lanes;      // how many lanes there are: those of one or two vectors
  int64_t step;   // elements from one key to the next in the matrix of scores
  int64_t first;  // the query position of the first lane
  int64_t last;   // the query position of the last lane that has a row
  // Keys [key_begin, key_end) are those that any of the rows may see, by positions and by the maps
  // of masks; none if begin >= end.
  int64_t key_begin, key_end;

  MapView map_view() const { return {plane, first, last}; }
};

template <class T>
Tile make_tile(const Problem& p, Plane plane, int64_t row, int64_t row_end, int64_t step = 0) {
  const int rows = int(std::min<int64_t>(kTileRows<T>, row_end - row));
  const int lanes = rows <= kLanes<T> ? kLanes<T> : 2 * kLanes<T>;
  const int64_t group = p.group();
  const int64_t first = group == 1 ? row : row / group;
  const int64_t last = group == 1 ? row + rows - 1 : (row + rows - 1) / group;
  Range keys{key_begin(p, first), key_end(p, last)};
  if (p.maps) keys = all_keys_shown(p, {plane, first, last}, keys);
  return {plane, row, rows, lanes, step ? step : lanes, first, last, keys.begin, keys.end};
}

// The keys that any of the tiles in states [count] may see.
template <class State>
Range keys_of_tiles(const State* states, int64_t count) {
  Range keys{std::numeric_limits<int64_t>::max(), 0};
  for (int64_t t = 0; t < count; ++t) {
    const Tile& tile = states[t].tile;
    if (tile.key_begin >= tile.key_end) continue;
    keys = {std::min(keys.begin, tile.key_begin), std::max(keys.end, tile.key_end)};
  }
  return keys;
}

// numbers [keys x lanes] = 0.
template <class T>
void clear_tile(const Tile& tile, int64_t keys, T* numbers) {
  for (int64_t j = 0; j < keys; ++j) std::fill_n(numbers + j * tile.step, tile.lanes, T(0));
}

// The query position of each lane of a vector, counted from the tile's first.
template <class T>
Vec<T> positions(const Problem& p, const Tile& tile, int vector) {
  Vec<T> v{};
  for (int l = 0; l < kLanes<T>; ++l)
    v[l] = T((tile.row + vector * kLanes<T> + l) / p.group() - tile.first);
  return v;
}

// For each lane the number that its head has in a [B..., H] tensor of doubles.
template <class T>
Vec<T> per_head(const Problem& p, const Tile& tile, const Input& input, int vector) {
  Vec<T> v{};
  for (int l = 0; l < kLanes<T>; ++l) {
    const int64_t head = (tile.row + vector * kLanes<T> + l) % p.group();
    v[l] = T(*plane<double>(p, input, tile.plane.batch, tile.plane.kv_head * p.group() + head));
  }
  return v;
}

}  // namespace qkv::QKV_ISA
