#include <ATen/ATen.h>
#include <c10/core/SymFloat.h>

#include <limits>
#include <vector>

#include "autograd/run.h"
#include "call/check.h"
#include "call/fixed_bits.h"
#include "call/scores.h"
#include "ops/attention/attention.h"

namespace qkv::ops {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Key or value with a head for every head of query, if enable_gqa shares them.
at::Tensor for_each_head(const Call& call, Argument argument, at::ScalarType type) {
  const at::Tensor& tensor = call[argument];
  if (!call.options.enable_gqa || tensor.dim() < 3 || call[arg::query].dim() < 3)
    return tensor.to(type);
  const c10::SymInt heads = tensor.sym_size(-3), query_heads = call[arg::query].sym_size(-3);
  if (heads == query_heads) return tensor.to(type);
  return at::repeat_interleave_symint(tensor.to(type), query_heads / heads, -3);
}

// tensor.expand(sizes), one dimension at a time, and so is its derivative: where the result of a
// sum is a single number, torch divides it among threads, and its last digits depend on how many
// there are.
at::Tensor spread(const at::Tensor& tensor, c10::SymIntArrayRef sizes) {
  std::vector<c10::SymInt> now(sizes.size() - size_t(tensor.dim()), 1);
  for (const c10::SymInt& size : tensor.sym_sizes()) now.push_back(size);
  at::Tensor result = tensor;
  for (size_t d = 0; d < sizes.size(); ++d) {
    now[d] = sizes[d];
    result = result.expand_symint(now);
  }
  return result;
}

// A number for each head, [..., H, L, 1], as a factor of `scores`.
at::Tensor per_head(const at::Tensor& tensor, const at::Tensor& scores) {
  const at::Tensor numbers = tensor.to(scores.scalar_type());
  auto sizes = scores.sym_sizes().vec();
  sizes.back() = 1;
  return spread(scores.dim() == 2 ? numbers.squeeze() : numbers.unsqueeze(-1).unsqueeze(-1), sizes);
}

// How far key j lies ahead of query i, as int64 [L, S]: where the last ones are side by side, or,
// if top_left, the first ones.
at::Tensor ahead(const at::Tensor& scores, bool top_left) {
  const c10::SymInt queries = scores.sym_size(-2), keys = scores.sym_size(-1);
  const auto count = [&](c10::SymIntArrayRef shape, int64_t dim) {
    return scores.new_ones_symint(shape, scores.options().dtype(at::kLong)).cumsum(dim);
  };
  const at::Tensor difference = count({1, keys}, 1).sub(count({queries, 1}, 0));
  return top_left ? difference : difference.sub(c10::Scalar(keys - queries));
}

at::Tensor hide_positions(const Options& options, at::Tensor scores) {
  const auto hide = [&](const at::Tensor& hidden) {
    scores = scores.masked_fill(hidden, -kInfinity);
  };
  if (options.is_causal) hide(ahead(scores, /*top_left=*/true).gt(0));
  const auto is_open = [](const c10::SymInt& side) { return side.maybe_as_int() == -1; };
  const Window& window = options.window_size;
  if (!is_open(window.left)) hide(ahead(scores, false).lt(c10::Scalar(-window.left)));
  if (!is_open(window.right)) hide(ahead(scores, false).gt(c10::Scalar(window.right)));
  return scores;
}

// Where a query sees a key by its spans: bool, broadcastable to [..., H, L, S].
at::Tensor seen_of(const at::Tensor& spans, const at::Tensor& scores) {
  const at::Tensor keys = at::arange(scores.sym_size(-1), scores.options().dtype(at::kInt));
  const auto ends = [&](int64_t column) { return spans.narrow(-1, column, 1); };
  at::Tensor seen;
  for (int64_t n = 0, count = spans.sym_sizes().back().guard_int(__FILE__, __LINE__) / 2; n < count;
       ++n) {
    const at::Tensor in_span = keys.ge(ends(2 * n)).logical_and(keys.lt(ends(2 * n + 1)));
    seen = n == 0 ? in_span : seen.logical_or(in_span);
  }
  return seen;
}

// [..., H, L, S], also where only value has some of the leading dimensions.
at::Tensor scores_of(const Call& call, at::ScalarType type) {
  const auto sizes = check<c10::SymInt>(call);
  const c10::SymFloat scale =
      call.options.scale ? c10::SymFloat(*call.options.scale)
                         : c10::SymFloat(1.0) / c10::SymFloat(sizes.head_dim.max(1)).sqrt();
  const at::Tensor key = for_each_head(call, arg::key, type);
  at::Tensor scores = at::matmul(call[arg::query].to(type), key.transpose(-2, -1)).mul(scale);
  scores = scores.expand_symint(sizes.scores());
  if (const double cap = call.options.softcap; cap > 0) scores = at::tanh(scores.div(cap)).mul(cap);
  scores = apply_score_program(call, scores);
  if (call.has(arg::alibi_slopes)) {
    const at::Tensor distances = ahead(scores, /*top_left=*/false).abs().to(type);
    scores = scores.sub(distances.mul(per_head(call[arg::alibi_slopes], scores)));
  }
  for (const Argument argument : kMaskArguments) {
    if (!call.has(argument)) continue;
    const at::Tensor& mask = call[argument];
    scores = mask.scalar_type() == at::kBool
                 ? scores.masked_fill(mask.logical_not(), -kInfinity)
                 : scores.add(spread(mask.to(type), scores.sym_sizes()));
  }
  if (call.has(arg::spans))
    scores = scores.masked_fill(seen_of(call[arg::spans], scores).logical_not(), -kInfinity);
  return hide_positions(call.options, scores);
}

// The weights [..., H, L, S], and lse [..., H, L].
std::pair<at::Tensor, at::Tensor> softmax_of(const Call& call, at::Tensor scores) {
  const c10::SymInt keys = scores.sym_size(-1);
  // The softmax of nothing but -inf, and its derivatives, would be NaN. A finite sink prevents it.
  at::Tensor dead = scores.eq(-kInfinity).all(-1, /*keepdim=*/true);
  at::Tensor sinks;
  if (call.has(arg::sinks)) {
    sinks = per_head(call[arg::sinks], scores);
    dead = dead.logical_and(sinks.isfinite().logical_not());
    scores = at::cat({scores, sinks}, -1);
  }
  scores = scores.masked_fill(dead, 0);
  // Not at::softmax: the last digits of its derivative depend on the number of threads. The
  // exponentials are relative to a number that cancels out, and takes no part in derivatives.
  const at::Tensor base = at::logsumexp(scores.detach(), -1, /*keepdim=*/true);
  const at::Tensor exponentials = scores.sub(base).exp();
  const at::Tensor sum = exponentials.sum(-1, /*keepdim=*/true);
  const at::Tensor weights = exponentials.div(sum).masked_fill(dead, 0).narrow_symint(-1, 0, keys);
  at::Tensor lse = sum.log().add(base).masked_fill(dead, -kInfinity);
  if (sinks.defined())  // which have no gradient where they are -inf
    lse = at::where(dead, sinks.masked_fill(sinks.eq(-kInfinity), -kInfinity), lse);
  return {weights, lse.squeeze(-1)};
}

// The set that dropout keeps follows from the seed and the place of a weight alone, so that it is
// taken off the weights of an attention in which all are equal.
at::Tensor after_dropout(const Call& call, const at::Tensor& weights) {
  const double p = call.options.dropout_p;
  if (!(p > 0)) return weights;
  const at::Tensor rows = at::zeros_like(weights.sum(-1, /*keepdim=*/true));
  const at::Tensor keys = at::zeros_like(weights.sum(-2, /*keepdim=*/true)).transpose(-2, -1);
  Call equal(weights_forward);
  equal.set(arg::query, rows);
  equal.set(arg::key, keys);
  equal.set(arg::dropout_seed, call[arg::dropout_seed]);
  equal.options.dropout_p = p;
  const at::Tensor kept = run(equal)[0].gt(0).to(weights.scalar_type());
  return weights.mul(kept.mul(p < 1 ? 1 / (1 - p) : 0));
}

at::Tensor reduced(const at::Tensor& weights, Reduce reduce) {
  if (reduce == Reduce::queries) return weights.sum(-2);
  return reduce == Reduce::heads && weights.dim() > 2 ? weights.mean(-3) : weights;
}

}  // namespace

Tensors attention_composition(const Call& call) {
  refuse_where_reproducible(call.title(), "a derivative that torch's operators make");
  const at::ScalarType type = call[arg::query].scalar_type(), compute = compute_type(type);
  const auto [all_weights, lse] = softmax_of(call, scores_of(call, compute));
  const at::Tensor weights = after_dropout(call, all_weights);
  Tensors results;
  for (const Argument result : call.op->results) {
    if (result == arg::output)
      results.push_back(at::matmul(weights, for_each_head(call, arg::value, compute)).to(type));
    else if (result == arg::weights)
      results.push_back(reduced(weights, call.options.reduce).to(type));
    else
      results.push_back(lse);
  }
  return results;
}

}  // namespace qkv::ops
