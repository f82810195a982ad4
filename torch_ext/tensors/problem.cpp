#include "tensors/problem.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "call/dtypes.h"
#include "common/mask_map.h"
#include "common/philox.h"
#include "tensors/option_numbers.h"

namespace qkv {
namespace {

// Key and value may have fewer heads than the Problem has kv_heads.
int64_t head_repeat(int64_t kv_heads, int64_t heads) {
  return heads <= 1 ? 1 : kv_heads / heads;  // one head: its stride is 0
}

}  // namespace

int num_threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

template <class Inputs, class Which>
void KernelCall::bind_differentiable(Inputs& to, const Which& which) {
  bind(to.query, which(arg::query));
  bind(to.key, which(arg::key));
  bind(to.value, which(arg::value));
  to.key.strides.head_repeat = head_repeat(problem.kv_heads, sizes_.key_heads);
  to.value.strides.head_repeat = head_repeat(problem.kv_heads, sizes_.value_heads);
  static_assert(kMaskArguments.size() == kMasks);
  for (int m = 0; m < kMasks; ++m) {
    const Argument mask = which(kMaskArguments[m]);
    if (!call_.has(mask)) continue;
    const std::optional<DType> floating = dtype_of(call_[mask].scalar_type());
    to.masks[m].type = floating ? mask_type(*floating) : MaskType::boolean;
    bind(to.masks[m].input, mask);
  }
  static_assert(kHeadArguments.size() == kHeadNumbers);
  for (int n = 0; n < kHeadNumbers; ++n) {
    const Argument argument = which(kHeadArguments[n]);
    if (!call_.has(argument)) continue;
    const at::Tensor& numbers = per_head_[per_heads_++] = call_[argument].to(at::kDouble);
    bind(to.by_head[n], numbers, Shape::per_head);
  }
}

KernelCall::KernelCall(const Call& call, const Sizes<int64_t>& sizes) : call_(call), sizes_(sizes) {
  const Options& options = call.options;
  Problem& p = problem;
  p.dtype = *dtype_of(call[arg::query].scalar_type());
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
  p.score_way = options.scores;
  p.num_threads = num_threads();

  bind_score_program();
  bind_differentiable(p, [](Argument argument) { return argument; });
  if (!call.has(arg::spans)) return;
  check_spans(call, sizes);
  bind(p.key_spans.input, arg::spans);
  p.key_spans.count = call[arg::spans].sizes().back() / 2;
}

void KernelCall::bind_tangents(JvpArgs& args) {
  bind_differentiable(args, tangent_of);
  if (!function_ || !call_.has(arg::score_tables_tangent)) return;
  function_->tangent = call_[arg::score_tables_tangent].contiguous();
  args.tables = function_->tangent.const_data_ptr();
}

void KernelCall::bind_score_program() {
  if (call_.options.score_program.empty()) return;
  function_ = std::make_unique<Function>();
  function_->program = score_program_of(call_);
  ScoreFunction& to = function_->function;
  problem.function = &to;
  to.program = function_->program.get();
  // In a cache, queries are the last positions; elsewhere the first query is number 0.
  to.from_last = sizes_.is_cache || call_.has(arg::block_table);
  const auto bind_rows = [&](Argument argument, at::Tensor& tensor, int64_t& step) -> const void* {
    if (!call_.has(argument)) return nullptr;
    tensor = call_[argument].contiguous();
    const int64_t rows = size_from_right<int64_t>(tensor, 1);
    if (rows != 1) step = tensor.sizes().back(), to.rows = rows;
    static constexpr double kNothing = 0;  // An empty table has no memory, and null stands for 0.
    return tensor.numel() == 0 ? &kNothing : tensor.const_data_ptr();
  };
  to.tables = bind_rows(arg::score_tables, function_->tables, to.table_step);
  to.indices =
      static_cast<const int32_t*>(bind_rows(arg::score_indices, function_->indices, to.index_step));
  if (to.rows > 1) to.items = sizes_.dropout_items() / to.rows;
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

void KernelCall::bind(Input& input, Argument argument) {
  if (call_.has(argument)) bind(input, call_[argument], kArguments[argument].shape);
}

void KernelCall::bind(Input& input, const at::Tensor& tensor, Shape shape) {
  input.data = tensor.const_data_ptr();
  add(tensor, input.strides, shape);
}

void KernelCall::bind(Output& output, const at::Tensor& tensor, Shape shape) {
  output.data = tensor.mutable_data_ptr();
  add(tensor, output.strides, shape);
}

void KernelCall::bind(std::initializer_list<Output*> outputs, const Tensors& results) {
  size_t i = 0;
  for (Output* output : outputs) {
    if (results[i].defined()) bind(*output, results[i], kArguments[call_.op->results[i]].shape);
    ++i;
  }
}

void KernelCall::add(const at::Tensor& tensor, Strides& strides, Shape shape) {
  const bool has_column = shape != Shape::row && shape != Shape::per_head;
  const bool has_row = shape != Shape::per_head;
  const bool rows_first =
      sizes_.packed && has_column && shape != Shape::mask && shape != Shape::spans;
  int64_t dims = 0;
  if (has_column) strides.col = stride_from_right(tensor, dims++);
  if (rows_first) strides.head = stride_from_right(tensor, dims++);
  if (has_row) strides.row = stride_from_right(tensor, dims++);
  if (!rows_first) strides.head = stride_from_right(tensor, dims++);
  operands_.push_back({&tensor, &strides, dims});
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
