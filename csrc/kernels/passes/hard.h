// Hard attention: the key with the largest score of every row, and the value of that key.
#pragma once

#include "kernels/operands/operands.h"
#include "kernels/operands/rows.h"
#include "kernels/operands/tile.h"
#include "kernels/passes/forward.h"
#include "kernels/products/few_rows.h"
#include "kernels/products/products.h"
#include "kernels/score/score.h"

namespace qkv::QKV_ISA {

// About how many keys are counted in the lanes of a vector, which hold 32 bits for scores of f32,
// before the number found is added to that of the first key, in 64 bits. The value is small so that
// every test with a few ten thousand keys goes through the addition, which costs nothing beside
// that many keys.
constexpr int64_t kCountedKeys = 1 << 14;

// The first of the largest scores in each lane; NaN is larger than all others.
template <class T>
struct Best {
  Vec<T> score;
  // The place of that score among the keys that are being counted; -1 if it was before them.
  IntVec<T> counted;
  int64_t index[kLanes<T>];  // the key of that score, if it was before them; -1 if there is none

  QKV_INLINE Best() : score(splat(-kInfinity<T>)), counted(IntVec<T>{} - 1) {
    std::fill_n(index, kLanes<T>, -1);
  }

  QKV_INLINE void see(Vec<T> other, int64_t at) {
    // !(other <= score) also for a NaN in other; one in score stays.
    const IntVec<T> better = ~(IntVec<T>)(other <= score) & (IntVec<T>)(score == score);
    score = better ? other : score;
    counted = better ? IntVec<T>{} + decltype(counted[0] + 0)(at) : counted;
  }

  // Ends the count of the keys that began with key `first`.
  void add_up(int64_t first) {
    for (int l = 0; l < kLanes<T>; ++l)
      if (counted[l] >= 0) index[l] = first + counted[l];
    counted = IntVec<T>{} - 1;
  }
};

template <class E, class T = Compute<E>>
void write_best(const Problem& p, const HardResult& result, const Tile& tile,
                const Best<T> (&best)[2]) {
  const Rows<E> output = rows_of<E>(p, result.output, tile.batch, tile.kv_head);
  const Rows<int64_t> index = rows_of<int64_t>(p, result.index, tile.batch, tile.kv_head);
  const E* value = key_plane<E>(p, p.value, tile.batch, tile.kv_head);
  const Strides& v = p.value.strides;
  for (int l = 0; l < tile.rows; ++l) {
    const int64_t key = best[l / kLanes<T>].index[l % kLanes<T>];
    if (index.data) *index[tile.row + l] = key;
    if (!output.data) continue;
    for (int64_t d = 0; d < p.head_dim_v; ++d)
      output[tile.row + l][d * output.col] = key < 0 ? E{} : value[key * v.row + d * v.col];
  }
}

// The operands of the scores, and the scores of one tile.
template <class E>
struct HardScratch {
  using T = Compute<E>;

  ProductUnit<E> unit;
  KeyOperand<E> keys;
  Factor<E>* query;  // memory for the packed queries of a tile
  T* scores;         // [kKeyBlock, kTileRows]

  HardScratch(Arena& arena, const Problem& p)
      : unit(!arena.counting()),
        keys(arena, p, kKeyBlock, p.head_dim, Use::rows),
        query(arena.take<Factor<E>>(kTileRows<T> * packed_size<E>(p.head_dim))),
        scores(arena.take<T>(kTileRows<T> * kKeyBlock)) {}
};

// Looks at keys [key, key + keys), whose places in the count begin with `at`.
template <class E, class T = Compute<E>>
void see_keys(const Problem& p, const Tile& tile, const RightOperand<Factor<E>>& query, int64_t key,
              int64_t keys, int64_t at, HardScratch<E>& s, Best<T> (&best)[2]) {
  s.keys.load(key_rows<E>(p, tile.batch, tile.kv_head), key, keys);
  multiply_rows(tile, s.keys.rows(key, keys), query, s.scores);
  apply_score_options<T>(p, tile, key, keys, s.scores);
  for (int v = 0; v < tile.lanes / kLanes<T>; ++v)
    for (int64_t j = 0; j < keys; ++j)
      best[v].see(load(s.scores + j * tile.lanes + v * kLanes<T>), at + j);
}

template <class E>
void hard(const Problem& p, const HardResult& result, const ForwardItem& item, void* workspace) {
  using T = Compute<E>;
  Arena arena(workspace);
  HardScratch<E> s(arena, p);
  const int64_t step = key_step(p.seqlen_k), counted = kCountedKeys / step * step;
  for (int64_t row = item.row_begin; row < item.row_end; row += kTileRows<T>) {
    const Tile tile = make_tile<T>(p, item.batch, item.kv_head, row, item.row_end);
    const auto query = pack_queries<E>(p, tile, s.query);
    Best<T> best[2];
    for (int64_t first = tile.key_begin; first < tile.key_end; first += counted) {
      const int64_t end = std::min(first + counted, tile.key_end);
      for (int64_t key = first; key < end; key += step)
        see_keys<E>(p, tile, query, key, std::min(step, end - key), key - first, s, best);
      for (Best<T>& of_vector : best) of_vector.add_up(first);
    }
    write_best<E>(p, result, tile, best);
  }
}

// What forward() needs for items of `rows` rows, and enough for hard().
template <class E>
size_t forward_workspace(const Problem& p, int64_t rows, bool with_weights) {
  Arena arena(nullptr), for_hard(nullptr);
  with_products<E>(p, [&](auto* products) {
    ForwardScratch<std::remove_pointer_t<decltype(products)>>(arena, p, rows, with_weights);
  });
  HardScratch<E>(for_hard, p);
  return std::max(arena.used(), for_hard.used());
}

}  // namespace qkv::QKV_ISA
