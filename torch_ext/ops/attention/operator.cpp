#include <ATen/ATen.h>

#include "autograd/compose.h"
#include "autograd/run.h"
#include "call/from_options.h"
#include "call/scores.h"
#include "ops/attention/attention.h"
#include "qkv/attention.h"
#include "tensors/compute.h"

namespace qkv {
namespace ops {
namespace {

Tensors attention_jvp_cpu(const Call& call) {
  JvpArgs args;
  JvpResult result;
  return compute(call, {&result.output, &result.lse, &result.output_jvp, &result.lse_jvp}, &args,
                 [&](const Problem& p) { qkv::attention_jvp(p, args, result); });
}

// On another device than the CPU: torch's own attention, or an error that says what it cannot do.
bool is_elsewhere(const Call& call) {
  const at::Device device = call[arg::query].device();
  return !device.is_cpu() && !device.is_meta();
}

Tensors attend_elsewhere(const Call& call) {
  check_tensors(call);
  const Options& o = call.options;
  const auto refuse = [&](bool wanted, std::string_view what) {
    TORCH_CHECK_NOT_IMPLEMENTED(!wanted, "attention: query is on ", call[arg::query].device(),
                                ", where torch's attention computes the result, and that cannot ",
                                what);
  };
  refuse(call.op->results.size() > 1, "return the log-sum-exp");
  refuse(call.has(arg::attn_mask) && call.has(arg::bias), "add bias to attn_mask; pass one mask");
  const at::Tensor& mask = call[call.has(arg::bias) ? arg::bias : arg::attn_mask];
  refuse(mask.defined() && o.is_causal, "combine attn_mask with is_causal; pass one mask");
  refuse(!(o.window_size.left == -1 && o.window_size.right == -1),
         "do window_size; pass an attn_mask");
  refuse(call.has(arg::spans), "do spans; pass an attn_mask");
  refuse(o.softcap != 0, "do softcap");
  refuse(!o.score_program.empty(), "do score_program");
  for (const Argument of_heads : kHeadArguments)
    refuse(call.has(of_heads),
           c10::str("do ", kArguments[of_heads].name,
                    of_heads == arg::alibi_slopes ? "; pass an attn_mask" : ""));
  return {at::scaled_dot_product_attention(call[arg::query], call[arg::key], call[arg::value],
                                           mask.defined() ? std::optional(mask) : std::nullopt,
                                           o.dropout_p, o.is_causal, o.scale, o.enable_gqa)};
}

// Of both, with and without the log-sum-exp.
Tensors attention_composite(const Call& call) {
  check_query(call);
  if (is_elsewhere(call)) return attend_elsewhere(call);
  Call wanted = call;
  wanted.wants_lse = call.op->results.size() > 1;
  Tensors results = attend(std::move(wanted));
  results.resize(call.op->results.size());
  return results;
}

// With tangents, which it does not send elsewhere.
Tensors attention_jvp_composite(const Call& call) {
  check_query(call);
  return attend(call, attention_forward_jvp);
}

// For those who call attention_forward and attention_forward_jvp themselves: _jagged.py.
Tensors forward_autocast(const Call& call) { return run_cast(Call(call)); }

// The tangents of attention's differentiable tensors, in a signature; suffix: "?", or "?=" with a
// default.
std::string tangents(std::string_view suffix) {
  std::string names;
  for (int i = 0; i < arg::kOfAttention; ++i)
    names += c10::str(i > 0 ? ", " : "", kArguments[tangent_of(Argument(i))].name, suffix);
  return names;
}
const std::string kTangentNames = tangents("?");

// scaled_dot_product_attention's arguments, in its order and with its defaults, then ours.
const std::string kSignature =
    "(query, key, value, attn_mask?=, dropout_p=, is_causal=, *, scale=, enable_gqa=, "
    "window_size=, " QKV_SCORE_KEYWORDS ", sinks?=, ";

DefinedOperator attention("attention",
                          "attention" + kSignature + QKV_PROGRAM_KEYWORDS ") -> output",
                          {.composite = &attention_composite});
DefinedOperator attention_with_lse("attention",
                                   "attention_with_lse" + kSignature +
                                       QKV_PROGRAM_KEYWORDS ") -> output, logsumexp",
                                   {.composite = &attention_composite});
DefinedOperator attention_jvp("attention_jvp",
                              "attention_jvp" + kSignature + tangents("?=") + ", " +
                                  QKV_PROGRAM_KEYWORDS
                                  ") -> output, logsumexp, output_tangent, logsumexp_tangent",
                              {.composite = &attention_jvp_composite});

}  // namespace

// What both are made of, and varlen_attention. Which weights dropout keeps follows from
// dropout_seed, so that it is drawn when a compiled program runs, and is the same again in the
// backward pass.
DefinedOperator attention_forward(
    "attention",
    "attention_forward(query, key, value, " QKV_SCORE_TENSORS
    ", sinks?, dropout_seed?, cu_seq_q?, "
    "cu_seq_k?, seqused_k?, *, dropout_p, is_causal, " QKV_SCORE_OPTIONS
    ", shard=, scores=) -> output, logsumexp",
    {.cpu = &attention_forward_cpu,
     .autocast = &forward_autocast,
     .composition = &attention_composition,
     .jvp = [](const Call& call) { return run(call.as(attention_forward_jvp)); }});
DefinedOperator attention_backward(
    attention_forward, "attention_backward(grad_output?, grad_logsumexp?; output, logsumexp)",
    {.cpu = &attention_backward_cpu, .jvp = &attention_backward_jvp});
DefinedOperator attention_double_backward(attention_backward,
                                          "attention_double_backward(" + kTangentNames +
                                              "; output_tangent?, logsumexp_tangent?)",
                                          {.cpu = &attention_double_backward_cpu});

// What both are in forward mode, and attention_jvp.
DefinedOperator attention_forward_jvp(
    "attention_jvp",
    "attention_forward_jvp(query, key, value, " QKV_SCORE_TENSORS
    ", sinks?, dropout_seed?, cu_seq_q?, cu_seq_k?, seqused_k?, " +
        kTangentNames +
        ", *, dropout_p, is_causal, " QKV_SCORE_OPTIONS
        ", shard=, scores=) -> output, logsumexp, output_tangent, logsumexp_tangent",
    {.cpu = &attention_jvp_cpu, .autocast = &forward_autocast, .composition = [](const Call& call) {
       return autograd::compose_jvp(call, attention_forward);
     }});
DefinedOperator attention_forward_jvp_backward(
    attention_forward_jvp,
    "attention_forward_jvp_backward(grad_output?, grad_logsumexp?, grad_output_tangent?, "
    "grad_logsumexp_tangent?; output, logsumexp, output_tangent, logsumexp_tangent)",
    {.composite = &attention_jvp_backward});

Tensors attention_forward_cpu(const Call& call) {
  ForwardResult result;
  return compute(call, {&result.output, &result.lse}, /*tangents=*/nullptr,
                 [&](const Problem& p) { qkv::attention_forward(p, result); });
}

void run_backward(KernelCall& kernel, BackwardArgs& args, const GradientTensors& gradients) {
  kernel.bind(args.output, arg::output);
  kernel.bind(args.lse, arg::logsumexp);
  kernel.bind(args.grad_output, arg::grad_output);
  kernel.bind(args.grad_lse, arg::grad_logsumexp);
  gradients.bind(kernel, args);
  kernel.set_strides();
  if (!has_queries(kernel.problem)) return gradients.zero();
  gradients.zero_gaps();
  kernel.problem.spans = gradients.spans();
  qkv::attention_backward(kernel.problem, args);
}

Tensors attention_backward_cpu(const Call& call) {
  const auto sizes = check<int64_t>(call);
  if (!call.has_incoming()) return no_results(call);
  const GradientTensors gradients(call, sizes);
  gradients.run_wide(&attention_forward, [&](const Call& wide) {
    KernelCall kernel(wide, sizes);
    BackwardArgs args;
    run_backward(kernel, args, gradients);
  });
  return gradients.results();
}

void check_query(const Call& call) {
  TORCH_CHECK(call.has(arg::query), call.title(), ": ", call.name_of(arg::query),
              " is an undefined tensor");
}

Tensors attend(Call call, const Operator& op) {
  at::Tensor seed;  // the call refers to it
  if (call.options.dropout_p > 0)
    call.set(arg::dropout_seed, seed = dropout_seed(call[arg::query]));
  call.op = &op;
  return run_cast(std::move(call));
}

}  // namespace ops

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const AttentionOptions& options) {
  return ops::attention.kernels.composite(call_of(ops::attention, query, key, value, options))[0];
}

std::tuple<at::Tensor, at::Tensor> attention_with_lse(const at::Tensor& query,
                                                      const at::Tensor& key,
                                                      const at::Tensor& value,
                                                      const AttentionOptions& options) {
  return pair_of(ops::attention_with_lse.kernels.composite(
      call_of(ops::attention_with_lse, query, key, value, options)));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_jvp(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const AttentionTangents& tangents, const AttentionOptions& options) {
  Call call = call_of(ops::attention_jvp, query, key, value, options);
#define QKV_SET_TANGENT(name, shape, type) \
  call.set(arg::name##_tangent, tensor_of(tangents.name()));
  QKV_ATTENTION_TENSORS(QKV_SET_TANGENT)
#undef QKV_SET_TANGENT
  const Tensors results = ops::attention_jvp.kernels.composite(call);
  return {results[0], results[1], results[2], results[3]};
}

}  // namespace qkv
