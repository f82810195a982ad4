#include "tensors/problem.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "common/philox.h"
#include "tensors/shard.h"

namespace qkv {
namespace {

// The stride of a dimension counted from the right; 0 where it broadcasts.
int64_t stride_from_right(const at::Tensor& tensor, int64_t i) {
  const int64_t dim = tensor.dim() - 1 - i;
  return dim < 0 || tensor.sizes()[dim] == 1 ? 0 : tensor.strides()[dim];
}

DType dtype_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return DType::f64;
    case at::kBFloat16:
      return DType::bf16;
    case at::kHalf:
      return DType::f16;
    default:
      return DType::f32;
  }
}

MaskType mask_type_of(at::ScalarType dtype) {
  if (dtype == at::kBool) return MaskType::boolean;
  switch (dtype_of(dtype)) {
    case DType::f64:
      return MaskType::f64;
    case DType::bf16:
      return MaskType::bf16;
    case DType::f16:
      return MaskType::f16;
    default:
      return MaskType::f32;
  }
}

// Key and value may have fewer heads than the Problem has kv_heads.
int64_t head_repeat(int64_t kv_heads, int64_t heads) {
  return heads <= 1 ? 1 : kv_heads / heads;  // one head: its stride is 0
}

}  // namespace

int num_threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

KernelCall::KernelCall(const Call& call, const Sizes<int64_t>& sizes) : call_(call), sizes_(sizes) {
  const Options& options = call.options;
  Problem& p = problem;
  p.dtype = dtype_of(call[arg::query].scalar_type());
  p.heads = sizes.heads;
  p.kv_heads = std::lcm(sizes.key_heads, sizes.value_heads);
  p.seqlen_q = sizes.seqlen_q;
  p.seqlen_k = sizes.seqlen_k;
  p.head_dim = sizes.head_dim;
  p.head_dim_v = sizes.head_dim_v;
  p.scale = options.scale.value_or(1 / std::sqrt(double(std::max<int64_t>(sizes.head_dim, 1))));
  p.is_causal = options.is_causal;
  bind_shard(call, sizes, p);
  // No wider than all there is, so that sums do not overflow.
  const int64_t widest =
      std::max(sizes.seqlen_q, p.shard.seqlen_q) + std::max(sizes.seqlen_k, p.shard.seqlen_k);
  const auto window = [&](const c10::SymInt& side) {
    return std::min(side.guard_int(__FILE__, __LINE__), widest);
  };
  p.window_left = window(options.window_size.left);
  p.window_right = options.causal ? 0 : window(options.window_size.right);
  p.softcap = options.softcap;
  p.dropout_p = options.dropout_p;
  if (p.dropout_p > 0) {
    const int64_t queries = p.shard.query_offset + p.seqlen_q;
    const int64_t keys = p.shard.key_offset + p.seqlen_k;
    TORCH_CHECK_VALUE(queries <= kMaxDropoutQueries && keys <= kMaxDropoutKeys, call.title(),
                      ": dropout_p is ", p.dropout_p, " with ", queries, " queries and ", keys,
                      " keys, but at most ", kMaxDropoutQueries, " and ", kMaxDropoutKeys,
                      " have random numbers of their own");
    bind_seeds();
  }
  constexpr ScoreWay kWays[] = {ScoreWay::automatic, ScoreWay::elements, ScoreWay::pairs,
                                ScoreWay::tiles};
  p.score_way = kWays[int(options.scores)];
  p.num_threads = num_threads();

  bind(p.query, call[arg::query], Dims::head_row_column);
  bind(p.key, call[arg::key], Dims::head_row_column);
  p.key.strides.head_repeat = head_repeat(p.kv_heads, sizes.key_heads);
  if (call.op->takes(arg::value)) {
    bind(p.value, call[arg::value], Dims::head_row_column);
    p.value.strides.head_repeat = head_repeat(p.kv_heads, sizes.value_heads);
  }
  bind_masks(p.masks, [](Argument mask) { return mask; });
  bind_per_head(arg::alibi_slopes, p.alibi_slopes);
  bind_per_head(arg::sinks, p.sinks);
}

void KernelCall::bind_tangents(JvpArgs& args) {
  const auto bind_rows = [&](Argument tangent, Input& input, const Input& primal) {
    if (!call_.has(tangent)) return;
    bind(input, call_[tangent], Dims::head_row_column);
    input.strides.head_repeat = primal.strides.head_repeat;
  };
  bind_rows(arg::query_tangent, args.query, problem.query);
  bind_rows(arg::key_tangent, args.key, problem.key);
  bind_rows(arg::value_tangent, args.value, problem.value);
  bind_masks(args.masks, [](Argument mask) { return tangent_of(mask); });
  bind_per_head(arg::alibi_slopes_tangent, args.alibi_slopes);
  bind_per_head(arg::sinks_tangent, args.sinks);
}

void KernelCall::bind_seeds() {
  seeds_ = call_[arg::dropout_seed].contiguous();
  const int64_t n = seeds_.sizes()[0];
  if (n == 0) return;  // and no batch items
  const int64_t* seeds = seeds_.const_data_ptr<int64_t>();
  problem.dropout_seed = uint64_t(seeds[0]);
  if (n == 1) return;
  problem.dropout_seeds = seeds;
  problem.dropout_items = std::max<int64_t>(1, sizes_.dropout_items() / n);
}

void KernelCall::bind_masks(std::array<Mask, kMasks>& masks, Argument (*which)(Argument)) {
  static_assert(kMaskArguments.size() == kMasks);
  for (int m = 0; m < kMasks; ++m) {
    const at::Tensor& mask = call_[which(kMaskArguments[m])];
    if (!mask.defined()) continue;
    masks[m].type = mask_type_of(mask.scalar_type());
    bind(masks[m].input, mask, Dims::scores);
  }
}

void KernelCall::bind_per_head(Argument argument, Input& input) {
  if (!call_.has(argument)) return;
  per_head_.push_back(call_[argument].to(at::kDouble));
  bind(input, per_head_.back(), Dims::head);
}

void KernelCall::bind(Input& input, const at::Tensor& tensor, Dims dims) {
  input.data = tensor.const_data_ptr();
  add(tensor, input.strides, dims);
}

void KernelCall::bind(Output& output, const at::Tensor& tensor, Dims dims) {
  output.data = tensor.mutable_data_ptr();
  add(tensor, output.strides, dims);
}

void KernelCall::add(const at::Tensor& tensor, Strides& strides, Dims dims) {
  switch (dims) {
    case Dims::head_row_column:
      strides.col = stride_from_right(tensor, 0);
      strides.row = stride_from_right(tensor, sizes_.packed ? 2 : 1);
      strides.head = stride_from_right(tensor, sizes_.packed ? 1 : 2);
      operands_.push_back({&tensor, &strides, 3});
      break;
    case Dims::scores:
      strides.col = stride_from_right(tensor, 0);
      strides.row = stride_from_right(tensor, 1);
      strides.head = stride_from_right(tensor, 2);
      operands_.push_back({&tensor, &strides, 3});
      break;
    case Dims::head_row:
      strides.row = stride_from_right(tensor, 0);
      strides.head = stride_from_right(tensor, 1);
      operands_.push_back({&tensor, &strides, 2});
      break;
    case Dims::head:
      strides.head = stride_from_right(tensor, 0);
      operands_.push_back({&tensor, &strides, 1});
      break;
  }
}

void KernelCall::set_strides() {
  Problem& p = problem;
  if (sizes_.packed || sizes_.is_cache) {
    p.batch_rank = 1;
    p.batch_sizes[0] = sizes_.packed ? sizes_.documents : sizes_.batch[0];
    for (const Operand& o : operands_) o.strides->batch[0] = stride_from_right(*o.tensor, o.batch);
    return;
  }
  // From the innermost dimension out, filling the arrays from their end.
  int first = kMaxBatchRank;
  const int64_t rank = sizes_.batch.size();
  for (int64_t i = 0; i < rank; ++i) {
    const int64_t n = sizes_.batch[rank - 1 - i];
    if (n == 1) continue;
    const auto stride = [&](const Operand& o) { return stride_from_right(*o.tensor, o.batch + i); };
    const bool merges = first < kMaxBatchRank &&
                        std::all_of(
                            operands_.begin(), operands_.end(),
                            [&](const Operand& o) {
                              return stride(o) == o.strides->batch[first] * p.batch_sizes[first];
                            });
    if (merges) {
      p.batch_sizes[first] *= n;
      continue;
    }
    TORCH_CHECK(first > 0, call_.title(), ": more than ", kMaxBatchRank,
                " leading dimensions of query, key, value and attn_mask cannot be merged with "
                "one another (leading sizes ",
                c10::ArrayRef<int64_t>(sizes_.batch), "); make one of them contiguous");
    p.batch_sizes[--first] = n;
    for (const Operand& o : operands_) o.strides->batch[first] = stride(o);
  }
  p.batch_rank = kMaxBatchRank - first;
  if (first == 0 || p.batch_rank == 0) return;
  std::move(p.batch_sizes.begin() + first, p.batch_sizes.end(), p.batch_sizes.begin());
  for (const Operand& o : operands_)
    std::move(o.strides->batch.begin() + first, o.strides->batch.end(), o.strides->batch.begin());
}

}  // namespace qkv
