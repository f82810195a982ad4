#include "ops.h"

#include "direct.h"
#include "operator.h"

namespace qkv::ops {
namespace {

const auto& attention_forward_op() {
  static const auto op = find_operator<OutputAndLse>("qkv::attention_forward", &forward_args);
  return op;
}
const auto& attention_backward_op() {
  static const auto op = find_operator<Gradients>("qkv::attention_backward", &backward_args);
  return op;
}
const auto& weights_forward_op() {
  static const auto op = find_operator<OutputAndLse>("qkv::weights_forward", &weights_args);
  return op;
}
const auto& weights_backward_op() {
  static const auto op = find_operator<Gradients>("qkv::weights_backward", &weights_backward_args);
  return op;
}
const auto& hard_forward_op() {
  static const auto op = find_operator<OutputAndIndex>("qkv::hard_forward", &hard_args);
  return op;
}
const auto& hard_backward_op() {
  static const auto op = find_operator<Gradients>("qkv::hard_backward", &hard_backward_args);
  return op;
}

std::optional<std::string_view> string_of(Reduce reduce) {
  if (reduce == Reduce::none) return std::nullopt;
  return reduce == Reduce::heads ? "heads" : "queries";
}

// invoke() with the arguments of a call as the dispatcher passes them.
template <class Invoke>
OutputAndLse pass(const Forward& c, const Invoke& invoke) {
  const Options& o = c.options;
  return invoke(c.query(), c.key(), c.value(), optional(c[kAttnMask]), optional(c[kAlibiSlopes]),
                optional(c[kSinks]), optional(c[kDropoutSeed]), optional(c[kCuSeqQ]),
                optional(c[kCuSeqK]), optional(c[kSequsedK]), o.dropout_p, o.is_causal, o.scale,
                o.enable_gqa, Window(o), o.softcap);
}

template <class Invoke>
Gradients pass(const Backward& c, const Invoke& invoke) {
  const Forward& f = c.forward;
  const Options& o = f.options;
  return invoke(optional(c.grad_output), optional(c.grad_lse), f.query(), f.key(), f.value(),
                optional(f[kAttnMask]), optional(f[kAlibiSlopes]), optional(f[kSinks]),
                optional(f[kDropoutSeed]), optional(f[kCuSeqQ]), optional(f[kCuSeqK]),
                optional(f[kSequsedK]), c.output, c.lse, o.dropout_p, o.is_causal, o.scale,
                o.enable_gqa, Window(o), o.softcap, c.output_mask);
}

template <class Invoke>
OutputAndLse pass(const Weights& c, const Invoke& invoke) {
  const Forward& f = c.forward;
  const Options& o = f.options;
  return invoke(f.query(), f.key(), optional(f[kAttnMask]), optional(f[kAlibiSlopes]),
                optional(f[kSinks]), optional(f[kDropoutSeed]), o.dropout_p, o.is_causal, o.scale,
                o.enable_gqa, Window(o), o.softcap, string_of(c.reduce));
}

template <class Invoke>
Gradients pass(const WeightsBackward& c, const Invoke& invoke) {
  const Forward& f = c.weights.forward;
  const Options& o = f.options;
  return invoke(c.grad_weights, f.query(), f.key(), optional(f[kAttnMask]),
                optional(f[kAlibiSlopes]), optional(f[kSinks]), optional(f[kDropoutSeed]), c.lse,
                o.dropout_p, o.is_causal, o.scale, o.enable_gqa, Window(o), o.softcap,
                string_of(c.weights.reduce), c.output_mask);
}

template <class Invoke>
OutputAndIndex pass(const Hard& c, const Invoke& invoke) {
  const Forward& f = c.forward;
  const Options& o = f.options;
  return invoke(f.query(), f.key(), f.value(), optional(f[kAttnMask]), optional(f[kAlibiSlopes]),
                o.is_causal, o.scale, o.enable_gqa, Window(o), o.softcap, c.straight_through);
}

template <class Invoke>
Gradients pass(const HardBackward& c, const Invoke& invoke) {
  const Forward& f = c.hard.forward;
  const Options& o = f.options;
  return invoke(c.grad_output, f.query(), f.key(), f.value(), optional(f[kAttnMask]),
                optional(f[kAlibiSlopes]), c.index, o.is_causal, o.scale, o.enable_gqa, Window(o),
                o.softcap, c.hard.straight_through, c.output_mask);
}

}  // namespace

at::Tensor dropout_seed(const at::Tensor& query) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("qkv::dropout_seed", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  return op.call(query);
}

OutputAndLse attention_forward(const Forward& call, bool wants_lse) {
  if (direct::is_possible(call.tensors)) return direct::attention_forward(call, wants_lse);
  return pass(call, [](auto&&... args) { return attention_forward_op().call(args...); });
}
OutputAndLse attention_forward(c10::DispatchKeySet keys, const Forward& call) {
  return pass(call,
              [&](auto&&... args) { return attention_forward_op().redispatch(keys, args...); });
}

Gradients attention_backward(const Backward& call) {
  const Forward& f = call.forward;
  if (direct::is_possible(f.tensors) &&
      direct::is_possible({&call.grad_output, &call.grad_lse, &call.output, &call.lse}))
    return direct::attention_backward(call);
  return pass(call, [](auto&&... args) { return attention_backward_op().call(args...); });
}
Gradients attention_backward(c10::DispatchKeySet keys, const Backward& call) {
  return pass(call,
              [&](auto&&... args) { return attention_backward_op().redispatch(keys, args...); });
}

OutputAndLse weights_forward(const Weights& call) {
  return pass(call, [](auto&&... args) { return weights_forward_op().call(args...); });
}
OutputAndLse weights_forward(c10::DispatchKeySet keys, const Weights& call) {
  return pass(call, [&](auto&&... args) { return weights_forward_op().redispatch(keys, args...); });
}

Gradients weights_backward(const WeightsBackward& call) {
  return pass(call, [](auto&&... args) { return weights_backward_op().call(args...); });
}
Gradients weights_backward(c10::DispatchKeySet keys, const WeightsBackward& call) {
  return pass(call,
              [&](auto&&... args) { return weights_backward_op().redispatch(keys, args...); });
}

OutputAndIndex hard_forward(const Hard& call) {
  return pass(call, [](auto&&... args) { return hard_forward_op().call(args...); });
}
OutputAndIndex hard_forward(c10::DispatchKeySet keys, const Hard& call) {
  return pass(call, [&](auto&&... args) { return hard_forward_op().redispatch(keys, args...); });
}

Gradients hard_backward(const HardBackward& call) {
  return pass(call, [](auto&&... args) { return hard_backward_op().call(args...); });
}
Gradients hard_backward(c10::DispatchKeySet keys, const HardBackward& call) {
  return pass(call, [&](auto&&... args) { return hard_backward_op().redispatch(keys, args...); });
}

std::array<c10::SymInt, 2> window_of(at::OptionalSymIntArrayRef window_size) {
  if (!window_size) return {-1, -1};
  TORCH_CHECK_VALUE(window_size->size() == 2, "attention: window_size is ", *window_size,
                    ", but two numbers are expected: (left, right), -1 for an open side");
  return {(*window_size)[0], (*window_size)[1]};
}

Reduce reduce_of(std::optional<std::string_view> reduce) {
  if (!reduce) return Reduce::none;
  if (*reduce == "heads") return Reduce::heads;
  TORCH_CHECK_VALUE(*reduce == "queries", "attention_weights: reduce is '", *reduce,
                    "', but None, 'heads' or 'queries' is expected");
  return Reduce::queries;
}

Forward forward_args(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const OptionalTensor& attn_mask, const OptionalTensor& alibi_slopes,
                     const OptionalTensor& sinks, const OptionalTensor& dropout_seed,
                     const OptionalTensor& cu_seq_q, const OptionalTensor& cu_seq_k,
                     const OptionalTensor& seqused_k, double dropout_p, bool is_causal,
                     std::optional<double> scale, bool enable_gqa,
                     at::OptionalSymIntArrayRef window_size, double softcap) {
  return {
      cu_seq_q ? "varlen_attention" : "attention",
      {&query, &key, &value, &tensor_of(attn_mask), &tensor_of(alibi_slopes), &tensor_of(sinks),
       &tensor_of(dropout_seed), &tensor_of(cu_seq_q), &tensor_of(cu_seq_k), &tensor_of(seqused_k)},
      {dropout_p, is_causal, scale, enable_gqa, window_of(window_size), softcap}};
}

Backward backward_args(const OptionalTensor& grad_output, const OptionalTensor& grad_lse,
                       const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                       const OptionalTensor& attn_mask, const OptionalTensor& alibi_slopes,
                       const OptionalTensor& sinks, const OptionalTensor& dropout_seed,
                       const OptionalTensor& cu_seq_q, const OptionalTensor& cu_seq_k,
                       const OptionalTensor& seqused_k, const at::Tensor& output,
                       const at::Tensor& lse, double dropout_p, bool is_causal,
                       std::optional<double> scale, bool enable_gqa,
                       at::OptionalSymIntArrayRef window_size, double softcap,
                       OutputMask output_mask) {
  return {tensor_of(grad_output),
          tensor_of(grad_lse),
          forward_args(query, key, value, attn_mask, alibi_slopes, sinks, dropout_seed, cu_seq_q,
                       cu_seq_k, seqused_k, dropout_p, is_causal, scale, enable_gqa, window_size,
                       softcap),
          output,
          lse,
          output_mask};
}

Weights weights_args(const at::Tensor& query, const at::Tensor& key,
                     const OptionalTensor& attn_mask, const OptionalTensor& alibi_slopes,
                     const OptionalTensor& sinks, const OptionalTensor& dropout_seed,
                     double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa,
                     at::OptionalSymIntArrayRef window_size, double softcap,
                     std::optional<std::string_view> reduce) {
  return {{"attention_weights",
           {&query, &key, &kNone, &tensor_of(attn_mask), &tensor_of(alibi_slopes),
            &tensor_of(sinks), &tensor_of(dropout_seed), &kNone, &kNone, &kNone},
           {dropout_p, is_causal, scale, enable_gqa, window_of(window_size), softcap},
           /*has_value=*/false},
          reduce_of(reduce)};
}

WeightsBackward weights_backward_args(const at::Tensor& grad_weights, const at::Tensor& query,
                                      const at::Tensor& key, const OptionalTensor& attn_mask,
                                      const OptionalTensor& alibi_slopes,
                                      const OptionalTensor& sinks,
                                      const OptionalTensor& dropout_seed, const at::Tensor& lse,
                                      double dropout_p, bool is_causal, std::optional<double> scale,
                                      bool enable_gqa, at::OptionalSymIntArrayRef window_size,
                                      double softcap, std::optional<std::string_view> reduce,
                                      OutputMask output_mask) {
  return {grad_weights,
          weights_args(query, key, attn_mask, alibi_slopes, sinks, dropout_seed, dropout_p,
                       is_causal, scale, enable_gqa, window_size, softcap, reduce),
          lse, output_mask};
}

Hard hard_args(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               const OptionalTensor& attn_mask, const OptionalTensor& alibi_slopes, bool is_causal,
               std::optional<double> scale, bool enable_gqa, at::OptionalSymIntArrayRef window_size,
               double softcap, bool straight_through) {
  return {{"hard_attention",
           {&query, &key, &value, &tensor_of(attn_mask), &tensor_of(alibi_slopes), &kNone, &kNone,
            &kNone, &kNone, &kNone},
           {0, is_causal, scale, enable_gqa, window_of(window_size), softcap}},
          straight_through};
}

HardBackward hard_backward_args(const at::Tensor& grad_output, const at::Tensor& query,
                                const at::Tensor& key, const at::Tensor& value,
                                const OptionalTensor& attn_mask, const OptionalTensor& alibi_slopes,
                                const at::Tensor& index, bool is_causal,
                                std::optional<double> scale, bool enable_gqa,
                                at::OptionalSymIntArrayRef window_size, double softcap,
                                bool straight_through, OutputMask output_mask) {
  return {grad_output,
          hard_args(query, key, value, attn_mask, alibi_slopes, is_causal, scale, enable_gqa,
                    window_size, softcap, straight_through),
          index, output_mask};
}

}  // namespace qkv::ops
