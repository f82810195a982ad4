#include "problem.h"

#include <ATen/Parallel.h>

#include <cmath>
#include <numeric>

namespace qkv {
namespace {

// The stride of a dimension counted from the right; 0 where it broadcasts.
int64_t stride_from_right(const at::Tensor& tensor, int64_t i) {
  const int64_t dim = tensor.dim() - 1 - i;
  return dim < 0 || tensor.sizes()[dim] == 1 ? 0 : tensor.strides()[dim];
}

MaskType mask_type(const OptionalTensor& mask) {
  if (!mask) return MaskType::none;
  if (mask->scalar_type() == at::kBool) return MaskType::boolean;
  return mask->scalar_type() == at::kFloat ? MaskType::f32 : MaskType::f64;
}

int num_threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

}  // namespace

Problem problem_of(const Forward& call, const Sizes<int64_t>& sizes) {
  const AttentionOptions& options = call.options;
  Problem p;
  p.dtype = call.query.scalar_type() == at::kFloat ? DType::f32 : DType::f64;
  p.heads = sizes.heads;
  p.kv_heads = std::lcm(sizes.key_heads, sizes.value_heads);
  p.seqlen_q = sizes.seqlen_q;
  p.seqlen_k = sizes.seqlen_k;
  p.head_dim = sizes.head_dim;
  p.head_dim_v = sizes.head_dim_v;
  p.scale = options.scale().value_or(1 / std::sqrt(double(std::max<int64_t>(sizes.head_dim, 1))));
  p.is_causal = options.is_causal();
  p.query.data = call.query.const_data_ptr();
  p.key.data = call.key.const_data_ptr();
  p.value.data = call.value.const_data_ptr();
  p.mask_type = mask_type(options.attn_mask());
  if (options.attn_mask()) p.mask.data = options.attn_mask()->const_data_ptr();
  p.num_threads = num_threads();
  return p;
}

c10::SmallVector<Operand, 12> operands_of(const Forward& call, Problem& p) {
  c10::SmallVector<Operand, 12> operands;
  operands.push_back({&call.query, &p.query.strides});
  operands.push_back({&call.key, &p.key.strides});
  operands.push_back({&call.value, &p.value.strides});
  if (call.options.attn_mask()) operands.push_back({&*call.options.attn_mask(), &p.mask.strides});
  if (p.kv_heads == 0) return operands;
  const auto head_repeat = [&](const at::Tensor& tensor) {
    const int64_t heads = tensor.dim() > 2 ? tensor.size(-3) : 1;
    return heads == 1 ? 1 : p.kv_heads / heads;  // one head: its stride is 0
  };
  p.key.strides.head_repeat = head_repeat(call.key);
  p.value.strides.head_repeat = head_repeat(call.value);
  return operands;
}

void set_strides(Problem& p, const Sizes<int64_t>& sizes, c10::ArrayRef<Operand> operands) {
  for (const Operand& o : operands) {
    const int64_t columns = o.has_columns;
    o.strides->col = columns ? stride_from_right(*o.tensor, 0) : 0;
    o.strides->row = stride_from_right(*o.tensor, columns);
    o.strides->head = stride_from_right(*o.tensor, columns + 1);
  }
  // From the innermost dimension out, filling the arrays from their end.
  int first = kMaxBatchRank;
  const int64_t rank = sizes.batch.size();
  for (int64_t i = 0; i < rank; ++i) {
    const int64_t n = sizes.batch[rank - 1 - i];
    if (n == 1) continue;
    const auto stride = [&](const Operand& o) {
      return stride_from_right(*o.tensor, o.has_columns + 2 + i);
    };
    const bool merges =
        first < kMaxBatchRank &&
        std::all_of(
            operands.begin(), operands.end(),
            [&](auto& o) { return stride(o) == o.strides->batch[first] * p.batch_sizes[first]; });
    if (merges) {
      p.batch_sizes[first] *= n;
      continue;
    }
    TORCH_CHECK(first > 0, "attention: more than ", kMaxBatchRank,
                " leading dimensions of query, key, value and attn_mask cannot be merged with "
                "one another (leading sizes ",
                c10::ArrayRef<int64_t>(sizes.batch), "); make one of them contiguous");
    p.batch_sizes[--first] = n;
    for (const Operand& o : operands) o.strides->batch[first] = stride(o);
  }
  p.batch_rank = kMaxBatchRank - first;
  if (first == 0 || p.batch_rank == 0) return;
  std::move(p.batch_sizes.begin() + first, p.batch_sizes.end(), p.batch_sizes.begin());
  for (const Operand& o : operands)
    std::move(o.strides->batch.begin() + first, o.strides->batch.end(), o.strides->batch.begin());
}

}  // namespace qkv
