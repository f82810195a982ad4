// Hard attention: the key with the largest score of every row, and the value of that key.
#pragma once

#include "kernels/passes/walk.h"
#include "kernels/products/products.h"
#include "kernels/score/score.h"

namespace qkv::QKV_ISA {

// The first of the largest scores in each lane; NaN is larger than all others. Keys are counted
// block by block, since a lane has 32 bits for scores of f32.
template <class T>
struct Best {
  Vec<T> score;
  IntVec<T> counted;         // the place of that score in the block; -1 if it was before the block
  int64_t index[kLanes<T>];  // the key of that score, if it was before; -1 if there is none

  QKV_INLINE Best() : score(splat(-kInfinity<T>)), counted(IntVec<T>{} - 1) {
    std::fill_n(index, kLanes<T>, -1);
  }

  QKV_INLINE void see(Vec<T> other, int64_t at) {
    // !(other <= score) also for a NaN in other; one in score stays.
    const IntVec<T> better = ~(IntVec<T>)(other <= score) & (IntVec<T>)(score == score);
    score = better ? other : score;
    counted = better ? IntVec<T>{} + decltype(counted[0] + 0)(at) : counted;
  }

  // Ends the block that began with key `first`.
  void add_up(int64_t first) {
    for (int l = 0; l < kLanes<T>; ++l)
      if (counted[l] >= 0) index[l] = first + counted[l];
    counted = IntVec<T>{} - 1;
  }
};

// What a tile of queries carries from one block of keys to the next.
template <class E, class T = Compute<E>>
struct HardState {
  Tile tile;
  RightOperand<Factor<E>> query;
  Best<T> best[2];

  QKV_INLINE HardState() {}  // of the instruction set, which an implicit one would not be
};

template <class E>
void write_best(const Problem& p, const HardResult& result, const HardState<E>& state) {
  const Tile& tile = state.tile;
  constexpr int W = kLanes<Compute<E>>;
  const Rows<E> output = rows_of<E>(p, result.output, tile.plane);
  const Rows<int64_t> index = rows_of<int64_t>(p, result.index, tile.plane);
  const E* value = key_plane<E>(p, p.value, tile.plane);
  const Strides& v = p.value.strides;
  for (int l = 0; l < tile.rows; ++l) {
    const int64_t key = state.best[l / W].index[l % W];
    if (index.data) *index[tile.row + l] = key;
    if (!output.data) continue;
    for (int64_t d = 0; d < p.head_dim_v; ++d)
      output[tile.row + l][d * output.col] = key < 0 ? E{} : value[key * v.row + d * v.col];
  }
}

template <class E>
struct HardScratch {
  using T = Compute<E>;

  ProductUnit unit;
  KeyOperand<E> keys;
  int64_t count, query_size;
  HardState<E>* tiles;
  Factor<E>* query;  // memory for the packed queries of the tiles
  T* scores;         // of one tile: [kKeyBlock, kTileRows]

  HardScratch(Arena& arena, const Problem& p, int64_t rows)
      : unit(!arena.counting()),
        keys(arena, copies_rows<E>(p, p.key), kKeyBlock, p.head_dim, Use::rows),
        count((rows + kTileRows<T> - 1) / kTileRows<T>),
        query_size(kTileRows<T> * packed_size<E>(p.head_dim)),
        tiles(arena.take<HardState<E>>(count)),
        query(arena.take<Factor<E>>(count * query_size)),
        scores(arena.take<T>(kTileRows<T> * kKeyBlock)) {}
};

// Looks at keys [key, key + keys), which are loaded.
template <class E, class T = Compute<E>>
void see_keys(const Problem& p, int64_t key, int64_t keys, const HardScratch<E>& s,
              HardState<E>& state) {
  const Tile& tile = state.tile;
  multiply_rows(tile, s.keys.rows(key, keys), state.query, s.scores);
  apply_score_options<T>(p, tile, key, keys, s.scores);
  for (int v = 0; v < tile.lanes / kLanes<T>; ++v) {
    for (int64_t j = 0; j < keys; ++j)
      state.best[v].see(load(s.scores + j * tile.lanes + v * kLanes<T>), j);
    state.best[v].add_up(key);
  }
}

template <class E>
size_t hard(const Problem& p, const HardResult& result, const ForwardItem& item, void* workspace) {
  using T = Compute<E>;
  Arena arena(workspace);
  HardScratch<E> s(arena, p, item.row_end - item.row_begin);
  if (arena.counting()) return arena.used();
  for (int64_t t = 0; t < s.count; ++t) {
    const int64_t row = item.row_begin + t * kTileRows<T>;
    HardState<E>& state = *new (s.tiles + t) HardState<E>;
    state.tile = make_tile<T>(p, item.plane, row, item.row_end);
    state.query = pack_queries<E>(p, state.tile, s.query + t * s.query_size);
  }
  for_each_block<1>(
      p, s.tiles, s.count, {0, p.seqlen_k}, key_step(p.seqlen_k),
      [&](int64_t key, int64_t keys, int64_t) {
        s.keys.load(key_rows<E>(p, item.plane), key, keys);
      },
      [&](HardState<E>& state, int64_t key, int64_t keys) { see_keys(p, key, keys, s, state); });
  for (int64_t t = 0; t < s.count; ++t) write_best<E>(p, result, s.tiles[t]);
  return arena.used();
}

}  // namespace qkv::QKV_ISA
