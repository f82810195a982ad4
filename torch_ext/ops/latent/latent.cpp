// qkv::latent_attention, and what its caches are attended to with.
#include "ops/latent/latent.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "autograd/run.h"
#include "call/autocast.h"
#include "call/from_options.h"
#include "ops/attention/attention.h"
#include "ops/indexed/indexed.h"
#include "ops/linear/linear.h"
#include "ops/linear/products.h"
#include "qkv/latent.h"

namespace qkv {
namespace ops {
namespace {

using c10::SymInt;
using Shape = Sizes<SymInt>::Shape;

Shape shape_of(c10::SymIntArrayRef leading, std::initializer_list<SymInt> last) {
  Shape shape(leading.begin(), leading.end());
  shape.append(last);
  return shape;
}

// The sizes of a tensor without the last `n` ones.
c10::SymIntArrayRef leading(const at::Tensor& tensor, int64_t n) {
  return tensor.sym_sizes().slice(0, tensor.dim() - n);
}

// [..., H, L, K] as [H, ... * L, K], and [H, ... * L, *] as [..., H, L, *], with the sizes of
// `like`.
at::Tensor rows_of_heads(const at::Tensor& tensor) { return tensor.movedim(-3, 0).flatten(1, -2); }

// rows [H, M, K] times the transposed matrix [H, N, K] where the core library multiplies them and
// nobody can ask for a derivative.
std::optional<at::Tensor> few_by_head(const at::Tensor& rows, const at::Tensor& matrix) {
  if (!are_constant({rows, matrix}) || !are_few_rows(rows, matrix)) return std::nullopt;
  return few_rows(rows, matrix, std::nullopt);
}

at::Tensor of_heads(const at::Tensor& rows, const at::Tensor& like) {
  Shape shape(leading(like, 3).begin(), leading(like, 3).end());
  shape.append({like.sym_size(-2)});
  return rows.unflatten_symint(1, shape).movedim(0, -3);
}

}  // namespace

LatentSizes check_queries(const Call& call) {
  check_tensors(call);
  const at::Tensor &query = call[arg::query], &key_weight = call[arg::key_weight];
  for (const Argument other : {arg::query_rope, arg::key_weight, arg::value_weight})
    expect_dtype(call[other].scalar_type() == query.scalar_type(), call, other,
                 ", but query_nope is ", name(query.scalar_type()));
  expect_shape<SymInt>(query.dim() >= 3, call, arg::query,
                       ", but at least 3 dimensions are expected: [..., H, L, N]");
  expect_rank<SymInt>(call, arg::key_weight, 3, "[H, N, C]");
  expect_rank<SymInt>(call, arg::value_weight, 3, "[H, Dv, C]");
  const LatentSizes s{query.sym_size(-2),     0,
                      query.sym_size(-1),     size_from_right<SymInt>(call[arg::query_rope], 0),
                      key_weight.sym_size(2), call[arg::value_weight].sym_size(1)};
  const SymInt heads = query.sym_size(-3);
  expect_sizes<SymInt>(call, arg::query_rope, "[..., H, L, R]", shape_of(leading(query, 1), {s.R}));
  expect_sizes<SymInt>(call, arg::key_weight, "[H, N, C]", {heads, s.N, s.C});
  expect_sizes<SymInt>(call, arg::value_weight, "[H, Dv, C]", {heads, s.Dv, s.C});
  return s;
}

void check_latents(const Call& call, Argument latents, c10::SymIntArrayRef leading,
                   LatentSizes& s) {
  const at::ScalarType dtype = call[arg::query].scalar_type();
  for (const Argument argument : {latents, arg::rope_keys})
    expect_dtype(!call.has(argument) || call[argument].scalar_type() == dtype, call, argument,
                 ", but query_nope is ", name(dtype));
  const bool apart = call.has(arg::rope_keys);
  const char* const dims = apart ? "[..., 1, S, C]" : "[..., 1, S, C + R]";
  expect_rank<SymInt>(call, latents, int64_t(leading.size()) + 3, dims);
  s.S = call[latents].sym_size(-2);
  expect_sizes<SymInt>(call, latents, dims, shape_of(leading, {1, s.S, apart ? s.C : s.C + s.R}));
  if (apart)
    expect_sizes<SymInt>(call, arg::rope_keys, "[..., 1, S, R]", shape_of(leading, {1, s.S, s.R}));
}

void set_scale(Call& call, const LatentSizes& s) {
  if (call.options.scale) return;
  const int64_t width = (s.N + s.R).guard_int(__FILE__, __LINE__);
  call.options.scale = 1 / std::sqrt(double(std::max<int64_t>(width, 1)));
}

bool absorbs(const Call& call, const LatentSizes& s) {
  if (call.options.absorb) return *call.options.absorb;
  const SymInt weights = s.C * (s.N + s.Dv);
  const SymInt seen = call.has(arg::indices) ? call[arg::indices].sym_size(-1).min(s.S) : s.S;
  // Of sizes that are not known yet nobody knows, and either way is right.
  return is_true(is_above(s.S * weights + s.L * seen * (s.N + s.R + s.Dv),
                          s.L * (seen * (2 * s.C + s.R) + weights)));
}

at::Tensor rows_of(const Call& call, Argument latents) {
  if (!call.has(arg::rope_keys)) return call[latents];
  return at::cat({call[latents], call[arg::rope_keys]}, -1);
}

at::Tensor absorbed_query(const Call& call) {
  const at::Tensor &query = call[arg::query], &weight = call[arg::key_weight];
  const at::Tensor rows = rows_of_heads(query);
  const auto few = few_by_head(rows, weight.mT());
  return at::cat({of_heads(few ? *few : at::bmm(rows, weight), query), call[arg::query_rope]}, -1);
}

at::Tensor absorbed_output(const Call& call, const at::Tensor& output) {
  const at::Tensor &weight = call[arg::value_weight], rows = rows_of_heads(output);
  const auto few = few_by_head(rows, weight);
  // In this order torch multiplies one row 1.7 (f32) and 2.3 times (bf16) as fast as by the
  // transposed weight.
  return of_heads(few ? *few : at::bmm(weight, rows.mT()).mT(), output);
}

at::Tensor whole_query(const Call& call) {
  return at::cat({call[arg::query], call[arg::query_rope]}, -1);
}

std::pair<at::Tensor, at::Tensor> expanded(const Call& call, const at::Tensor& latents,
                                           const at::Tensor& rope_keys) {
  const auto project = [&, shared = latents.squeeze(-3)](Argument argument) {
    const at::Tensor& weight = call[argument];
    if (weight.scalar_type() != at::kFloat)
      return at::einsum("...sc,hnc->...hsn", {shared, weight});
    // As a layer's projection, it is oneDNN's where that is faster than torch's product.
    return projected(shared, weight.flatten(0, 1), std::nullopt)
        .unflatten_symint(-1, weight.sym_sizes().slice(0, 2))
        .transpose(-3, -2);
  };
  const at::Tensor key = project(arg::key_weight);
  const Shape of_heads = shape_of(leading(key, 1), {rope_keys.sym_size(-1)});
  return {at::cat({key, rope_keys.expand_symint(of_heads)}, -1), project(arg::value_weight)};
}

namespace {

// attention's results, of this query, key and value, with the options of `call`.
Tensors attend_to(const Call& call, const at::Tensor& query, const at::Tensor& key,
                  const at::Tensor& value) {
  Call inner = call.as(attention_forward);
  inner.set(arg::query, query);
  inner.set(arg::key, key);
  inner.set(arg::value, value);
  inner.options.enable_gqa = true;
  if (!call.has(arg::indices)) return attend(std::move(inner));
  inner.set(arg::indices, call[arg::indices]);
  return attend_to_indices(inner);
}

Tensors latent_composite(const Call& given) {
  check_query(given);
  Call call = given;
  const Autocast autocast(call, {arg::query, arg::query_rope, arg::key, arg::rope_keys,
                                 arg::key_weight, arg::value_weight, arg::attn_mask});
  LatentSizes s = check_queries(call);
  const at::Tensor &query = call[arg::query], &latents = call[arg::key];
  check_latents(call, arg::key, query.sym_sizes().slice(0, query.dim() - 3), s);
  set_scale(call, s);
  if (absorbs(call, s)) {
    const at::Tensor rows = rows_of(call, arg::key);
    Tensors results = attend_to(call, absorbed_query(call), rows, rows.narrow_symint(-1, 0, s.C));
    results[0] = absorbed_output(call, results[0]);
    return results;
  }
  const auto [key, value] =
      call.has(arg::rope_keys)
          ? expanded(call, latents, call[arg::rope_keys])
          : expanded(call, latents.narrow_symint(-1, 0, s.C), latents.narrow_symint(-1, s.C, s.R));
  return attend_to(call, whole_query(call), key, value);
}

DefinedOperator latent_attention(
    "latent_attention",
    "latent_attention(query_nope as query, query_rope, latents as key, rope_keys?, key_weight, "
    "value_weight, attn_mask?=, dropout_p=, is_causal=, *, scale=, absorb=, "
    "window_size=, " QKV_SCORE_KEYWORDS ", sinks?=, indices?=, " QKV_PROGRAM_KEYWORDS
    ") -> output, logsumexp",
    {.composite = &latent_composite});

}  // namespace
}  // namespace ops

std::tuple<at::Tensor, at::Tensor> latent_attention(
    const at::Tensor& query_nope, const at::Tensor& query_rope, const at::Tensor& latents,
    const std::optional<at::Tensor>& rope_keys, const at::Tensor& key_weight,
    const at::Tensor& value_weight, const AttentionOptions& options, std::optional<bool> absorb) {
  Call call = call_of(ops::latent_attention, query_nope, latents, kNone, options);
  call.set(arg::query_rope, query_rope);
  call.set(arg::rope_keys, tensor_of(rope_keys));
  call.set(arg::key_weight, key_weight);
  call.set(arg::value_weight, value_weight);
  call.options.absorb = absorb;
  return pair_of(ops::latent_attention.kernels.composite(call));
}

}  // namespace qkv
