#include "merge.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/half.h"
#include "common/strides.h"

namespace qkv {
namespace {

// Each part is weighted by its share of the softmax's denominator. A part whose split the row sees
// nothing of (its log-sum-exp is -inf) is left out, and a part with a NaN makes the row NaN.
template <class E>
void merge_row(const Problem& p, const ForwardResult& result, int64_t batch, int64_t kv_head,
               int64_t row, const RowParts& parts) {
  using T = Compute<E>;
  constexpr T kInf = std::numeric_limits<T>::infinity();
  const int64_t head = kv_head * p.group() + row % p.group(), query = row / p.group();
  const T* const lse = static_cast<const T*>(parts.lse) + row;
  const int64_t Dv = result.output.data ? p.head_dim_v : 0;

  T max = -kInf;
  for (int64_t s = 0; s < parts.splits; ++s) max = std::max(max, lse[s * parts.rows]);
  T* const total = static_cast<T*>(parts.output) + row * p.head_dim_v;  // of the first part
  T sum = 0;
  for (int64_t s = 0; s < parts.splits; ++s) {
    const int64_t at = s * parts.rows;
    const T* const part = total + at * p.head_dim_v;
    if (lse[at] == -kInf) {
      for (int64_t d = 0; s == 0 && d < Dv; ++d) total[d] = 0;
      continue;
    }
    const T share = std::exp(lse[at] - max);
    sum += share;
    for (int64_t d = 0; d < Dv; ++d)
      total[d] = s == 0 ? share * part[d] : total[d] + share * part[d];
  }
  if (result.lse.data)
    plane<T>(p, result.lse, batch, head)[query * result.lse.strides.row] =
        T(double(max) + std::log(double(sum)));
  E* const output =
      Dv ? plane<E>(p, result.output, batch, head) + query * result.output.strides.row : nullptr;
  const T divisor = sum == 0 ? 1 : sum;  // 0 where the row has nothing to attend to
  for (int64_t d = 0; d < Dv; ++d)
    output[d * result.output.strides.col] = narrow<E>(total[d] / divisor);
}

}  // namespace

void merge_row(const Problem& p, const ForwardResult& result, int64_t batch, int64_t kv_head,
               int64_t row, const RowParts& parts) {
  with_type(p.dtype,
            [&](auto e) { merge_row<decltype(e)>(p, result, batch, kv_head, row, parts); });
}

}  // namespace qkv
