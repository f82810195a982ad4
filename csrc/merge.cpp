#include "merge.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "repair.h"
#include "strides.h"

namespace qkv {
namespace {

// The parts are weighted by their shares of the softmax's denominator. Parts that
// saw nothing (-inf) are left out; a part with a NaN makes the row NaN.
template <class T>
void merge_row(const Problem& p, const ForwardResult& result, int64_t batch, int64_t kv_head,
               int64_t row, const RowParts& parts) {
  constexpr T kInf = std::numeric_limits<T>::infinity();
  const int64_t head = kv_head * p.group() + row % p.group(), query = row / p.group();
  const T* const lse = static_cast<const T*>(parts.lse) + row;
  const T* const part = static_cast<const T*>(parts.output) + row * p.head_dim_v;
  const int64_t Dv = result.output.data ? p.head_dim_v : 0, col = result.output.strides.col;
  T* const output =
      Dv ? plane<T>(p, result.output, batch, head) + query * result.output.strides.row : nullptr;

  T max = -kInf;
  for (int64_t s = 0; s < parts.splits; ++s) max = std::max(max, lse[s * parts.rows]);
  for (int64_t d = 0; d < Dv; ++d) output[d * col] = 0;
  T sum = 0;
  for (int64_t s = 0; s < parts.splits; ++s) {
    const int64_t at = s * parts.rows;
    if (lse[at] == -kInf) continue;
    const T share = std::exp(lse[at] - max);
    sum += share;
    for (int64_t d = 0; d < Dv; ++d) output[d * col] += share * part[at * p.head_dim_v + d];
  }
  if (result.lse.data)
    plane<T>(p, result.lse, batch, head)[query * result.lse.strides.row] =
        T(double(max) + std::log(double(sum)));
  if (sum == 0) return;  // nothing to attend to
  T zero = 0;
  for (int64_t d = 0; d < Dv; ++d) {
    output[d * col] /= sum;
    zero += output[d * col] * 0;
  }
  if (may_leak(p) && !(zero == 0)) repair_output(p, result, batch, kv_head, row, double(sum));
}

}  // namespace

void merge_row(const Problem& p, const ForwardResult& result, int64_t batch, int64_t kv_head,
               int64_t row, const RowParts& parts) {
  (p.dtype == DType::f32 ? merge_row<float> : merge_row<double>)(p, result, batch, kv_head, row,
                                                                 parts);
}

}  // namespace qkv
