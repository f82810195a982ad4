// Products of pairs by AMX, which take the place of gemm<Pair> in tile_gemm.h: C[M x N] = beta * C
// + alpha * A[M x K] * B[K x N], with a_col = 1. One instruction adds 16 x 16 sums over a depth of
// 16 pairs.
//
// AMX has eight registers, called tiles, of 16 rows of 64 bytes: here 2 x 2 of sums, two of A and
// two of B. The instructions are in isa/amx/vec.h.
#pragma once

#ifndef QKV_ISA  // this header is opened by itself (kernels/simd/vec.h)
#include "isa/amx/vec.h"
#endif

#include "kernels/gemm/pairs.h"
#include "kernels/gemm/peak.h"
#include "kernels/gemm/tile_gemm.h"
#include "kernels/simd/vec.h"

namespace qkv::QKV_ISA {

constexpr int kTile = 16;

// The next three are described in gemm.h.
constexpr bool kTiles = true;
constexpr int kProductRows = 2 * kTile;
// Configures the tile registers of this thread for as long as it lives.
class ProductUnit {
 public:
  explicit ProductUnit(bool in_use) : in_use_(in_use) {
    if (in_use_) Tiles::configure();
  }
  ~ProductUnit() {
    if (in_use_) Tiles::release();
  }
  ProductUnit(const ProductUnit&) = delete;
  ProductUnit& operator=(const ProductUnit&) = delete;

  // Multiplies what the tiles happen to hold, every 64 vectors. On a Xeon of family 6, model 207,
  // the unit falls asleep some 1000 cycles after a product, and the next one waits for 800: 32
  // products and 160 exponentials, in turns, took 1720 cycles, with 192 exponentials 2680.
  static QKV_INLINE void keep_awake(int64_t vectors) {
    if (vectors % 64 == 0) Tiles::dot<0, 4, 6>();
  }

 private:
  bool in_use_;
};

// Rows `row` apart; where there are fewer than 16 of them, or of pairs in them, zeros.
template <int tile>
QKV_INLINE void load_operand(const Pair* from, int64_t row, int64_t rows, int64_t pairs) {
  if (rows >= kTile && pairs >= kTile) return Tiles::load<tile>(from, row * sizeof(Pair));
  alignas(64) Pair copy[kTile][kTile] = {};
  for (int64_t r = 0; r < std::min<int64_t>(rows, kTile); ++r)
    std::memcpy(copy[r], from + r * row, std::min<int64_t>(pairs, kTile) * sizeof(Pair));
  Tiles::load<tile>(copy, sizeof copy[0]);
}

// Sums that begin with C, and become C as they are.
QKV_INLINE bool in_place(const MicroArgs<Pair>& args, int64_t rows) {
  return rows >= kTile && args.alpha == 1 && args.beta != Beta::lanes;
}

template <int tile>
QKV_INLINE void begin_sum(const MicroArgs<Pair>& args, const float* c, int64_t rows) {
  if (in_place(args, rows) && args.beta == Beta::one) {
    Tiles::load<tile>(c + args.before, args.c_row * sizeof(float));
  } else {
    Tiles::zero<tile>();
  }
}

template <int tile>
QKV_INLINE void finish_sum(const MicroArgs<Pair>& args, float* c, const float* lanes,
                           int64_t rows) {
  if (in_place(args, rows)) return Tiles::store<tile>(c, args.c_row * sizeof(float));
  alignas(64) float sums[kTile][kTile];
  Tiles::store<tile>(sums, sizeof sums[0]);
  for (int64_t r = 0; r < std::min<int64_t>(rows, kTile); ++r, c += args.c_row) {
    Vec<float> sum = load(sums[r]) * args.alpha;
    if (args.beta == Beta::one) sum += load(c + args.before);
    if (args.beta == Beta::lanes) sum += load(lanes) * load(c + args.before);
    store(c, sum);
  }
}

// Up to MT x NT tiles of C; the last row of tiles may have fewer rows.
template <int MT, int NT>
void multiply_tiles(const MicroArgs<Pair>& args, int64_t rows, int64_t column) {
  const int64_t below = rows - kTile;
  if (args.ahead) args.ahead->ask();
  const Pair *a = args.a, *b = args.b + column;
  float *c = args.c + column, *c_below = c + kTile * args.c_row;
  const float* lanes = args.lanes ? args.lanes + column : nullptr;
  begin_sum<0>(args, c, rows);
  if (NT == 2) begin_sum<1>(args, c + kTile, rows);
  if (MT == 2) begin_sum<2>(args, c_below, below);
  if (MT == 2 && NT == 2) begin_sum<3>(args, c_below + kTile, below);
  for (int64_t pairs = args.depth; pairs > 0; pairs -= kTile) {
    load_operand<6>(b, args.b_row, pairs, kTile);
    if (NT == 2) load_operand<7>(b + kTile, args.b_row, pairs, kTile);
    load_operand<4>(a, args.a_row, rows, pairs);
    Tiles::dot<0, 4, 6>();
    if (NT == 2) Tiles::dot<1, 4, 7>();
    if (MT == 2) load_operand<5>(a + kTile * args.a_row, args.a_row, below, pairs);
    if (MT == 2) Tiles::dot<2, 5, 6>();
    if (MT == 2 && NT == 2) Tiles::dot<3, 5, 7>();
    a += kTile;
    b += kTile * args.b_row;
  }
  finish_sum<0>(args, c, lanes, rows);
  const float* lanes_beside = lanes ? lanes + kTile : nullptr;
  if (NT == 2) finish_sum<1>(args, c + kTile, lanes_beside, rows);
  if (MT == 2) finish_sum<2>(args, c_below, lanes, below);
  if (MT == 2 && NT == 2) finish_sum<3>(args, c_below + kTile, lanes_beside, below);
}

// `columns` is a multiple of 16.
template <>
inline void gemm<Pair>(int64_t rows, int64_t columns, MicroArgs<Pair>&& args) {
  for (; rows > 0; rows -= 2 * kTile) {
    for (int64_t n = 0; n < columns; n += 2 * kTile) {
      const bool wide = columns - n > kTile, tall = rows > kTile;
      (tall   ? wide ? multiply_tiles<2, 2> : multiply_tiles<2, 1>
       : wide ? multiply_tiles<1, 2>
              : multiply_tiles<1, 1>)(args, rows, n);
    }
    args.a += 2 * kTile * args.a_row;
    args.c += 2 * kTile * args.c_row;
  }
}

// As in multiply_tiles<2, 2>, each of four sums gets the product of one of two tiles of A and one
// of two of B.
template <>
inline double peak_loop<Pair>(int64_t iterations) {
  const ProductUnit unit(true);
  Pair factors[kTile * kTile];
  for (Pair& factor : factors) factor = peak_factor<Pair>();
  Tiles::load<4>(factors, kTile * sizeof(Pair));
  Tiles::load<5>(factors, kTile * sizeof(Pair));
  Tiles::load<6>(factors, kTile * sizeof(Pair));
  Tiles::load<7>(factors, kTile * sizeof(Pair));
  for (; iterations > 0; --iterations) {
    Tiles::dot<0, 4, 6>();
    Tiles::dot<1, 4, 7>();
    Tiles::dot<2, 5, 6>();
    Tiles::dot<3, 5, 7>();
  }
  return 0;
}

}  // namespace qkv::QKV_ISA
