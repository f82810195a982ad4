#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "autograd/run.h"
#include "call/autocast.h"
#include "call/check.h"
#include "call/fixed_bits.h"
#include "call/from_options.h"
#include "ops/attention/attention.h"
#include "ops/indexed/indexed.h"
#include "ops/kvcache/kvcache.h"
#include "qkv/indexed.h"
#include "tensors/overlap.h"

namespace qkv {
namespace ops {
namespace {

using c10::SymInt;

void check_indices(const Call& call) {
  check_tensors(call);
  const at::Tensor &query = call[arg::query], &indices = call[arg::indices];
  const at::ScalarType type = indices.scalar_type();
  expect_dtype(type == at::kInt || type == at::kLong, call, arg::indices,
               ", but int32 or int64 is expected");
  expect_shape<SymInt>(query.dim() >= 3, call, arg::query,
                       ", but at least 3 dimensions are expected with indices: [..., H, L, D]");
  expect_shape<SymInt>(indices.dim() == query.dim() || indices.dim() == query.dim() - 1, call,
                       arg::indices, ", but [..., L, k] or [..., Hkv, L, k] is expected for query ",
                       query.sym_sizes());
  Sizes<SymInt> sizes;
  check_dense(call, sizes);
  const int64_t last = indices.dim() < query.dim() ? 2 : 3;
  expect_shape<SymInt>(
      expands_to<SymInt>(indices.sym_sizes().slice(0, indices.dim() - last), sizes.batch), call,
      arg::indices, ", whose leading dimensions do not broadcast to ",
      c10::SymIntArrayRef(sizes.batch));
  expect_shape<SymInt>(is_one_or(indices.sym_size(-2), query.sym_size(-2)), call, arg::indices,
                       ", but its second last dimension must be query's, ", query.sym_size(-2));
  if (indices.dim() < query.dim()) return;
  const SymInt heads = size_from_right<SymInt>(call[arg::key], 2);
  expect_shape<SymInt>(is_one_or(indices.sym_size(-3), heads), call, arg::indices,
                       ", but its heads must be key's, ", heads, ", or 1");
}

// --- by a mask ----------------------------------------------------------------------------------

// bool [..., 1 or H, L, S]: whether a query has chosen a key.
at::Tensor mask_of(const Call& call) {
  const at::Tensor &query = call[arg::query], &given = call[arg::indices];
  const at::Tensor indices = given.dim() == query.dim() ? given : given.unsqueeze(-3);
  const SymInt S = call[arg::key].sym_size(-2);
  if (is_plain(call) && indices.numel() > 0)
    TORCH_CHECK(indices.max().item<int64_t>() < S, call.title(), ": indices has the number ",
                indices.max().item<int64_t>(), ", but key has ", S,
                " keys; expected numbers below that, or -1 for none");
  const auto sizes = indices.sym_sizes();
  Sizes<SymInt>::Shape shape(sizes.begin(), sizes.end());
  shape.back() = S + 1;  // the first one is for what names no key; behind the last one is no place
  const at::Tensor places = (indices.to(at::kLong) + 1).clamp_min(0);
  const at::Tensor mask = indices.new_zeros_symint(shape, at::TensorOptions(at::kBool))
                              .scatter(-1, places, true)
                              .narrow_symint(-1, 1, S);
  const SymInt groups = mask.sym_size(-3), heads = query.sym_size(-3);
  // A query of one head has as many as key.
  return is_one(groups) || is_one(heads) ? mask : mask.repeat_interleave_symint(heads / groups, -3);
}

Tensors attend_by_mask(const Call& call) {
  Call inner = call.as(attention_forward);
  at::Tensor mask = mask_of(call);
  if (call.has(arg::attn_mask)) {
    at::Tensor given = call[arg::attn_mask];
    if (given.scalar_type() == at::kBool) {
      mask = given.logical_and(mask);
    } else if (!call.has(arg::bias)) {  // which the kernels sum the gradient of
      inner.set(arg::bias, call[arg::attn_mask]);
    } else {
      // In the compute type, in which torch then sums the gradient of what was broadcast.
      given = given.to(compute_type(call[arg::query].scalar_type()));
      mask = at::where(mask, given, at::scalar_tensor(-INFINITY, given.options()));
    }
  }
  inner.set(arg::attn_mask, mask);
  return attend(std::move(inner));
}

// --- by what each query has chosen ---------------------------------------------------------------

bool is_recorded(const Call& call) {
  for (int i = 0; i < arg::kDifferentiable; ++i) {
    const at::Tensor& tensor = call[Argument(i)];
    if (!tensor.defined()) continue;
    if ((at::GradMode::is_enabled() && tensor.requires_grad()) || tensor._fw_grad(0).defined())
      return true;
  }
  return false;
}

// Whether the keys may be read one by one: all but what depends on where a key stands, or on the
// head, and what is added to single scores.
bool can_gather(const Call& call) {
  if (reproducible()) return false;  // keys that are gathered are numbered anew
  const at::Tensor &query = call[arg::query], &key = call[arg::key], &value = call[arg::value];
  if (!is_plain(call) || query.dim() != 4 || key.dim() != 4 || value.dim() != 4) return false;
  const Options& options = call.options;
  if (options.dropout_p != 0 || !options.score_program.empty()) return false;
  for (const Argument other : {arg::bias, arg::spans, arg::alibi_slopes})
    if (call.has(other)) return false;
  const at::Tensor& mask = call[arg::attn_mask];
  if (mask.defined() &&
      (mask.scalar_type() != at::kBool || mask.dim() > 4 || (mask.dim() > 2 && mask.size(-3) != 1)))
    return false;
  if (call.has(arg::sinks) && (call[arg::sinks].dim() != 1 || call[arg::indices].dim() == 4))
    return false;
  const int64_t B = query.size(0), H = query.size(1), S = key.size(2);
  const int64_t heads = key.size(1);
  return B == key.size(0) && B == value.size(0) && heads == value.size(1) && heads > 0 &&
         (options.enable_gqa ? H % heads == 0 : H == heads) &&
         B * heads * S <= std::numeric_limits<int32_t>::max() && S == value.size(2) &&
         2 * call[arg::indices].size(-1) <= S;
}

// [B, H, n, *] as [B * G * n, H / G, *]: the rows of every group of heads, one after the other.
at::Tensor rows_of_groups(const at::Tensor& tensor, int64_t groups) {
  return tensor.unflatten(1, {groups, tensor.size(1) / groups}).transpose(2, 3).flatten(0, 2);
}

// The results of `inner` with this query, and with the keys and values that `select` takes out of
// its own. What positions hide is not among these, or its mask hides it.
template <class Select>
Tensors run_on_selected(Call inner, const at::Tensor& query, const Select& select) {
  const at::Tensor &key = inner[arg::key], &value = inner[arg::value];
  const at::Tensor keys = select(key);
  const at::Tensor values =
      begins_rows(value, key) ? keys.narrow(-1, 0, value.size(-1)) : select(value);
  inner.set(arg::query, query);
  inner.set(arg::key, keys);
  inner.set(arg::value, values);
  inner.options.is_causal = false;
  inner.options.window_size = {};
  return run(inner);
}

// Each query is a document whose keys are pages of one key.
Tensors attend_by_pages(const Call& call, const ChosenKeys& chosen) {
  const at::Tensor& query = call[arg::query];
  const int64_t B = query.size(0), H = query.size(1), L = query.size(2);
  const int64_t documents = chosen.counts.size(0), G = documents / (B * L);
  const at::AutoDispatchBelowADInplaceOrView below;  // nothing is recorded of the views
  const at::Tensor ends = at::empty({documents + 1}, chosen.counts.options());
  std::iota(ends.mutable_data_ptr<int64_t>(), ends.mutable_data_ptr<int64_t>() + documents + 1, 0);
  Call inner = call.as(varlen_attention_paged);
  inner.set(arg::cu_seq_q, ends);
  inner.set(arg::seqused_k, chosen.counts);
  inner.set(arg::block_table, chosen.keys);
  inner.options.enable_gqa = true;
  const auto pages = [&](const at::Tensor& all) { return rows_of_groups(all, G).unsqueeze(1); };
  Tensors results = run_on_selected(inner, rows_of_groups(query, G), pages);
  results[0] = results[0].unflatten(0, {B, G, L}).transpose(2, 3).flatten(1, 2);
  results[1] = results[1].unflatten(1, {B, G, L}).permute({1, 2, 0, 3}).reshape({B, H, L});
  return results;
}

// The results of one batch item, by a mask.
Tensors attend_item_by_mask(Call call, int64_t item) {
  std::array<at::Tensor, arg::count> own;  // a call points to its tensors
  for (const Argument a : {arg::query, arg::key, arg::value, arg::attn_mask, arg::indices}) {
    const bool has_items = call.has(a) && (a == arg::indices || call[a].dim() == 4);
    if (!has_items || call[a].size(0) == 1) continue;
    own[a] = call[a].narrow(0, item, 1);
    call.set(a, own[a]);
  }
  return attend_by_mask(call);
}

// Each block of queries attends to the keys that any of them has chosen, behind a mask; but items
// that are not `by_blocks` by a mask of all keys.
Tensors attend_by_blocks(const Call& call, const std::vector<ChosenBlock>& blocks,
                         const std::vector<char>& by_blocks) {
  const at::Tensor& query = call[arg::query];
  std::vector<std::vector<at::Tensor>> outputs(query.size(0)), lses(query.size(0));
  for (int64_t item = 0; item < query.size(0); ++item) {
    if (by_blocks[item]) continue;
    Tensors results = attend_item_by_mask(call, item);
    outputs[item].push_back(std::move(results[0]));
    lses[item].push_back(std::move(results[1]));
  }
  for (const ChosenBlock& block : blocks) {
    if (!by_blocks[block.item]) continue;
    const auto select = [&](const at::Tensor& all) {
      return all.narrow(0, block.item, 1).index_select(2, block.keys);
    };
    Call inner = call.as(attention_forward);
    inner.set(arg::attn_mask, block.mask);
    const at::Tensor queries = query.narrow(0, block.item, 1).slice(2, block.begin, block.end);
    Tensors results = run_on_selected(inner, queries, select);
    outputs[block.item].push_back(std::move(results[0]));
    lses[block.item].push_back(std::move(results[1]));
  }
  const auto together = [](std::vector<std::vector<at::Tensor>>& parts) {
    std::vector<at::Tensor> items;
    for (const auto& of_item : parts) items.push_back(at::cat(of_item, 2));
    return at::cat(items, 0);
  };
  return {together(outputs), together(lses)};
}

Tensors indexed_composite(const Call& given) {
  check_query(given);
  Call call = given;
  const Autocast autocast(call, {arg::query, arg::key, arg::value, arg::attn_mask});
  return attend_to_indices(call);
}

DefinedOperator indexed_attention(
    "attention",
    "indexed_attention(query, key, value, indices, attn_mask?=, dropout_p=, is_causal=, *, scale=, "
    "enable_gqa=, window_size=, " QKV_SCORE_KEYWORDS ", sinks?=, " QKV_PROGRAM_KEYWORDS
    ") -> output, logsumexp",
    {.composite = &indexed_composite});

}  // namespace

Tensors attend_to_indices(const Call& call) {
  check_indices(call);
  if (!can_gather(call) || call[arg::query].numel() == 0) return attend_by_mask(call);
  check_supported(call);
  const bool recorded = is_recorded(call),
             by_head = call[arg::indices].dim() == 4 && call[arg::indices].size(1) > 1;
  if (recorded && by_head) return attend_by_mask(call);
  const ChosenKeys chosen = chosen_keys(call);
  if (!recorded) return attend_by_pages(call, chosen);
  const int64_t S = call[arg::key].size(2), L = call[arg::query].size(2);
  const std::vector<ChosenBlock> blocks = blocks_of_queries(chosen, L, S);
  // Each item takes its way whatever the others take: the two have other last digits.
  std::vector<int64_t> pairs(call[arg::query].size(0));
  for (const ChosenBlock& block : blocks) pairs[block.item] += block.mask.numel();
  std::vector<char> by_blocks;
  for (const int64_t n : pairs) by_blocks.push_back(2 * n <= L * S);
  const bool any = std::find(by_blocks.begin(), by_blocks.end(), true) != by_blocks.end();
  return any ? attend_by_blocks(call, blocks, by_blocks) : attend_by_mask(call);
}

}  // namespace ops

std::tuple<at::Tensor, at::Tensor> indexed_attention(const at::Tensor& query, const at::Tensor& key,
                                                     const at::Tensor& value,
                                                     const at::Tensor& indices,
                                                     const AttentionOptions& options) {
  Call call = call_of(ops::indexed_attention, query, key, value, options);
  call.set(arg::indices, indices);
  return pair_of(ops::indexed_attention.kernels.composite(call));
}

}  // namespace qkv
