// The output of a tile, O^T [Dv x lanes], while it is summed over blocks of keys.
#pragma once

#include "kernels/operands/operand.h"
#include "kernels/operands/rows.h"
#include "kernels/operands/tile.h"
#include "kernels/simd/transpose.h"

namespace qkv::QKV_ISA {

// to [tile.rows, padded(dim)] = the columns of output [dim x lanes] times factors
// [lanes]. Overwrites output.
template <class T>
const T* transposed_rows(const Tile& tile, int64_t dim, const T* factors, T* output, T* to) {
  for (int v = 0; v < tile.lanes; v += kLanes<T>)
    for (int64_t d = 0; d < dim; ++d) {
      T* at = output + d * tile.lanes + v;
      store(at, load(at) * load(factors + v));
    }
  const int64_t step = padded<T>(dim);
  transpose(output, tile.lanes, to, step, step, tile.lanes);
  return to;
}

// Whether a row of output [dim x lanes] holds NaN or an infinity. One in a value spoils all lanes
// of its row alike, so it is enough to look at one vector of lanes.
template <class T>
bool is_spoilt(const Tile& tile, int64_t dim, const T* output) {
  constexpr int kSums = 4;  // independent sums, which hide the latency of an addition
  Vec<T> zero[kSums] = {};
  int64_t d = 0;
  for (; d + kSums <= dim; d += kSums) {
    QKV_UNROLL
    for (int s = 0; s < kSums; ++s) zero[s] += load(output + (d + s) * tile.lanes) * T(0);
  }
  for (; d < dim; ++d) zero[0] += load(output + d * tile.lanes) * T(0);
  return any_nonzero<T>(zero[0] + zero[1] + (zero[2] + zero[3]));
}

template <class E>
class OutputSum {
  using T = Compute<E>;

 public:
  OutputSum(Arena&, const Problem& p) : dim_(p.head_dim_v) {}

  // How many elements the output of a tile has.
  static int64_t size(const Problem& p) { return kTileRows<T> * padded<T>(p.head_dim_v); }

  // output = rescale [lanes] * before + V^T weights [keys x lanes]. `before` and `output` lie in
  // one workspace, and may be the same.
  void add(const Tile& tile, const LeftOperand<T>& values, int64_t, const T* weights,
           const T* rescale, const T* before, T* output) const {
    multiply(values, {weights, tile.step}, tile.lanes,
             Sum<T>{output, tile.lanes, Beta::lanes, rescale, before - output});
  }

  // Returns the rows [tile.rows, padded(Dv)] of factors [lanes] * output; both are overwritten.
  const T* rows(const Tile& tile, T* factors, T* output, T* to) const {
    return transposed_rows(tile, dim_, factors, output, to);
  }

 private:
  int64_t dim_;
};

}  // namespace qkv::QKV_ISA
