// Tiles of our own making as the operands of products of pairs: TileAsA and TileAsB
// (tile_operand.h) and OutputSum (output_sum.h), whose functions are described there. Tiles are
// rounded to bf16 as operands, and nowhere else.
#pragma once

#include "kernels/gemm/pairs.h"
#include "kernels/operands/operand.h"
#include "kernels/operands/output_sum.h"
#include "kernels/operands/rows.h"
#include "kernels/operands/tile.h"
#include "kernels/operands/tile_operand.h"
#include "kernels/score/pair_softmax.h"

namespace qkv::QKV_ISA {

// The most pairs of keys of a tile, and of zeros after them.
constexpr int64_t kMostPairs = padded<Pair>(pairs_in(kKeyBlock));

// Adds rows of zeros to those of `keys` keys, up to `depth` pairs.
inline void clear_pairs(int64_t lanes, int64_t keys, int64_t depth, Pair* pairs) {
  std::fill(pairs + pairs_in(keys) * lanes, pairs + depth * lanes, Pair{});
}

template <>
class TileAsB<BFloat16> {
 public:
  explicit TileAsB(Arena& arena) : pairs_(arena.take<Pair>(kMostPairs * kTileRows<float>)) {}

  template <class F>
  void each(const Tile& tile, const float* from, int64_t keys, int64_t depth, bool with_rest,
            const F& product) const {
    clear_pairs(tile.lanes, keys, depth, pairs_);
    pair_rows(from, tile.step, keys, tile.lanes, pairs_);
    product(RightOperand<Pair>{pairs_, tile.lanes});
    if (!with_rest) return;
    pair_rest(from, tile.step, keys, tile.lanes, pairs_);
    product(RightOperand<Pair>{pairs_, tile.lanes});
  }

 private:
  Pair* pairs_;
};

template <>
class TileAsA<BFloat16> {
 public:
  explicit TileAsA(Arena& arena) : narrow_(arena.take<BFloat16>(kKeyBlock * kGradRows)) {}

  template <class F>
  void each(const float* from, int64_t keys, int64_t rows, bool with_rest, const F& product) const {
    const LeftOperand<Pair> a = {
        {reinterpret_cast<const Pair*>(narrow_), kGradRows / 2, 1}, keys, pairs_in(rows)};
    narrow_rows(from, kGradRows, keys, rows, narrow_, kGradRows);
    product(a);
    if (!with_rest) return;
    narrow_rest(from, kGradRows, keys, rows, narrow_, kGradRows);
    product(a);
  }

 private:
  BFloat16* narrow_;
};

// The weights are rounded to bf16, and the output is divided by the sum of the rounded ones
// (pair_softmax.h). With dropout the sum is that of all weights, and those that are multiplied are
// only the kept ones, so there is no sum of its own.
template <>
class OutputSum<BFloat16> {
 public:
  using Reference = LargestScore<float>;

  explicit OutputSum(Arena& arena) : pairs_(arena.take<Pair>(kMostPairs * kTileRows<float>)) {}

  static bool has_own_sum(const Problem& p) { return p.dropout_p == 0; }

  void softmax(const Tile& tile, int64_t keys, float* scores, float* max_state, float* sum_state,
               float* own_sum, float* rescale) const {
    softmax_pairs(tile.lanes, keys, scores, max_state, sum_state, own_sum, rescale, pairs_);
  }
  void change_weights(const Tile& tile, int64_t keys, const float* weights) const {
    pair_rows(weights, tile.step, keys, tile.lanes, pairs_);
  }

  RightOperand<Pair> operand(const Tile& tile, int64_t keys, int64_t depth, const float*) const {
    clear_pairs(tile.lanes, keys, depth, pairs_);
    return {pairs_, tile.lanes};
  }

 private:
  Pair* pairs_;
};

}  // namespace qkv::QKV_ISA
