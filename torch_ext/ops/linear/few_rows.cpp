#include "ops/linear/few_rows.h"

#include <ATen/ATen.h>

#include "call/dtypes.h"
#include "ops/linear/who_multiplies.h"
#include "row_product.h"
#include "tensors/problem.h"

namespace qkv::ops {
namespace {

using at::Tensor;

// A product that has no data yet, of rows that follow each other without a gap.
RowProduct product_of(const Tensor& input, const Tensor& matrix) {
  RowProduct p;
  p.dtype = *dtype_of(input.scalar_type());
  p.batch = matrix.dim() == 3 ? matrix.size(0) : 1;
  p.depth = matrix.size(-1), p.columns = matrix.size(-2);
  p.rows = input.numel() / std::max<int64_t>(1, p.batch * p.depth);
  p.input.strides.row = p.depth, p.input.strides.head = p.rows * p.depth;
  p.output.strides.row = p.columns, p.output.strides.head = p.rows * p.columns;
  p.input.strides.col = p.output.strides.col = 1;
  p.matrix.strides.col = matrix.stride(-1), p.matrix.strides.row = matrix.stride(-2);
  if (matrix.dim() == 3) p.matrix.strides.head = matrix.stride(0);
  return p;
}

}  // namespace

bool are_few_rows(const Tensor& input, const Tensor& matrix) {
  const WhoMultiplies& who = who_multiplies();
  const at::ScalarType dtype = input.scalar_type();
  const int64_t most = dtype == at::kFloat      ? who.f32_rows
                       : dtype == at::kBFloat16 ? who.bf16_rows
                       : dtype == at::kHalf     ? who.f16_rows
                                                : 0;
  if (most == 0) return false;
  const RowProduct p = product_of(input, matrix);
  return p.rows <= most && multiplies_rows(p);
}

Tensor few_rows(const Tensor& input, const Tensor& matrix, const std::optional<Tensor>& bias) {
  RowProduct p = product_of(input, matrix);
  const Tensor rows = input.contiguous();
  at::DimVector sizes(input.sizes().begin(), input.sizes().end());
  sizes.back() = p.columns;
  const Tensor output = at::empty(sizes, input.options());
  p.input.data = rows.const_data_ptr(), p.matrix.data = matrix.const_data_ptr();
  p.output.data = output.mutable_data_ptr();
  if (bias) p.bias.data = bias->const_data_ptr(), p.bias.strides.col = bias->stride(0);
  p.num_threads = num_threads();
  row_product(p);
  return output;
}

}  // namespace qkv::ops
