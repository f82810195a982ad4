#include "ops.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace qkv::ops {
namespace {

// The operator `name`, whose parameters are those of `pack`.
template <class Result, auto pack>
struct Operator;

template <class Result, class Call, class... Args, Call (*pack)(Args...)>
struct Operator<Result, pack> {
  static const auto& find(const char* name) {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Result(Args...)>();
    return op;
  }
};

const auto& forward_operator() {
  return Operator<OutputAndLse, &forward_args>::find("qkv::attention_forward");
}
const auto& backward_operator() {
  return Operator<Gradients, &backward_args>::find("qkv::attention_backward");
}

// window_size as an argument: None where it is open.
class Window {
 public:
  explicit Window(const Options& options) : sizes_(options.window_size) {
    if (sizes_[0].maybe_as_int() == -1 && sizes_[1].maybe_as_int() == -1) return;
    argument_ = c10::SymIntArrayRef(sizes_);
  }
  operator at::OptionalSymIntArrayRef() const { return argument_; }

 private:
  const std::array<c10::SymInt, 2>& sizes_;
  at::OptionalSymIntArrayRef argument_;
};

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

}  // namespace

at::Tensor dropout_seed(const at::Tensor& query) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("qkv::dropout_seed", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  return op.call(query);
}

OutputAndLse attention_forward(const Forward& call) {
  return pass(call, [](auto&&... args) { return forward_operator().call(args...); });
}

OutputAndLse attention_forward(c10::DispatchKeySet keys, const Forward& call) {
  return pass(call, [&](auto&&... args) { return forward_operator().redispatch(keys, args...); });
}

Gradients attention_backward(const Backward& call) {
  return pass(call, [](auto&&... args) { return backward_operator().call(args...); });
}

Gradients attention_backward(c10::DispatchKeySet keys, const Backward& call) {
  return pass(call, [&](auto&&... args) { return backward_operator().redispatch(keys, args...); });
}

std::array<c10::SymInt, 2> window_of(at::OptionalSymIntArrayRef window_size) {
  if (!window_size) return {-1, -1};
  TORCH_CHECK_VALUE(window_size->size() == 2, "attention: window_size is ", *window_size,
                    ", but two numbers are expected: (left, right), -1 for an open side");
  return {(*window_size)[0], (*window_size)[1]};
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

}  // namespace qkv::ops
