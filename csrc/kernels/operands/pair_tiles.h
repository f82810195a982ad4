// Tiles of our own making as the operands of products of pairs: TileAsA and TileAsB
// (tile_operand.h) and OutputSum (output_sum.h), whose functions are described there. Tiles are
// rounded to bf16 as operands, and nowhere else.
#pragma once

#ifndef QKV_ISA  // this header is opened by itself (kernels/simd/vec.h)
#include "isa/avx512bf16/vec.h"
#endif

#include "kernels/gemm/gemm.h"
#include "kernels/operands/operand.h"
#include "kernels/operands/output_sum.h"
#include "kernels/operands/rows.h"
#include "kernels/operands/tile.h"
#include "kernels/operands/tile_operand.h"

namespace qkv::QKV_ISA {

template <>
class TileAsB<BFloat16> {
 public:
  explicit TileAsB(Arena& arena)
      : pairs_(arena.take<Pair>(padded<Pair>(pairs_in(kKeyBlock)) * kTileRows<float>)) {}

  template <class F>
  void each(const Tile& tile, const float* from, int64_t keys, int64_t depth, bool with_rest,
            const F& product) const {
    pad(tile.lanes, keys, depth);
    pair_rows(from, tile.step, keys, tile.lanes, pairs_);
    product(RightOperand<Pair>{pairs_, tile.lanes});
    if (!with_rest) return;
    pair_rest(from, tile.step, keys, tile.lanes, pairs_);
    product(RightOperand<Pair>{pairs_, tile.lanes});
  }

  // The tile times factors [lanes]; errors [lanes] as pair_rows has them.
  RightOperand<Pair> scaled(const Tile& tile, const float* from, int64_t keys, int64_t depth,
                            const float* factors, float* errors) const {
    pair_rows(from, tile.step, keys, tile.lanes, factors, pairs_, errors);
    pad(tile.lanes, keys, depth);
    return {pairs_, tile.lanes};
  }

 private:
  // Adds rows of zeros up to `depth` pairs.
  void pad(int64_t lanes, int64_t keys, int64_t depth) const {
    std::fill(pairs_ + pairs_in(keys) * lanes, pairs_ + depth * lanes, Pair{});
  }

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

// The weights are rounded to bf16. To keep their error small they are first divided by the largest
// weight of their row so far, which so becomes 1, and at the end the output is divided by the sum
// of the rounded weights. The log-sum-exp has the sum of the exact ones.
//
// Below the output [padded(Dv) x lanes] lie two rows more: the largest weight, by which the output
// is divided, and what rounding has added to the sum of the weights, divided by it as well.
template <>
class OutputSum<BFloat16> {
 public:
  OutputSum(Arena& arena, const Problem& p) : p_(p), weights_(arena) {}

  static int64_t size(const Problem& p) {
    return kTileRows<float> * (padded<float>(p.head_dim_v) + 2);
  }

  void add(const Tile& tile, const LeftOperand<Pair>& values, int64_t keys, const float* weights,
           const float* rescale, const float* before, float* output) const {
    float inverse[kTileRows<float>], keep[kTileRows<float>], errors[kTileRows<float>];
    const float* largest = largest_weights(tile, before);
    float* now_largest = largest_weights(tile, output);
    for (int v = 0; v < tile.lanes; v += kLanes<float>) {
      const Vec<float> rescaled = rescale ? load(largest + v) * load(rescale + v) : Vec<float>{};
      Vec<float> top = max<float>(rescaled, splat(1e-30f));  // not 0, which would give 0 / 0
      for (int64_t j = 0; j < keys; ++j) top = max<float>(top, load(weights + j * tile.step + v));
      store(now_largest + v, top);
      store(inverse + v, 1 / top);
      store(keep + v, rescaled / top);
    }
    const RightOperand<Pair> b =
        weights_.scaled(tile, weights, keys, values.depth, inverse, errors);
    for (int v = 0; v < tile.lanes; v += kLanes<float>)
      store(now_largest + tile.lanes + v,
            rescale ? load(largest + tile.lanes + v) * load(keep + v) + load(errors + v)
                    : load(errors + v));
    multiply(
        values, b, tile.lanes,
        Sum<float>{output, tile.lanes, rescale ? Beta::lanes : Beta::zero, keep, before - output});
  }

  template <class To>
  void write(const Tile& tile, float* factors, const float* output, const Rows<To>& to,
             int64_t begin) const {
    for (int v = 0; v < tile.lanes; v += kLanes<float>) {
      const float* largest = largest_weights(tile, output) + v;
      const Vec<float> factor = load(factors + v) * load(largest);
      // With dropout the sum is that of all weights, and those that were multiplied are only the
      // kept ones, so what rounding added to these says nothing about the sum.
      const Vec<float> error = p_.dropout_p > 0 ? Vec<float>{} : load(largest + tile.lanes);
      store(factors + v, factor / (1 + error * factor));
    }
    write_columns(tile, p_.head_dim_v, factors, output, to, begin);
  }

 private:
  template <class F>  // float or const float
  F* largest_weights(const Tile& tile, F* output) const {
    return output + tile.lanes * padded<float>(p_.head_dim_v);
  }

  const Problem& p_;
  TileAsB<BFloat16> weights_;
};

}  // namespace qkv::QKV_ISA
