#include "ops.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace qkv::ops {
namespace {

template <class Result>
using ForwardSignature = Result(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                const OptionalTensor&, double, bool, std::optional<double>, bool);
using BackwardSignature = Gradients(const OptionalTensor&, const OptionalTensor&, const at::Tensor&,
                                    const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                                    const at::Tensor&, const at::Tensor&, double, bool,
                                    std::optional<double>, bool, std::array<bool, 3>);

template <class Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

const auto& with_lse() {
  static const auto op = find<ForwardSignature<OutputAndLse>>("qkv::attention_with_lse");
  return op;
}

const auto& backward() {
  static const auto op = find<BackwardSignature>("qkv::attention_backward");
  return op;
}

}  // namespace

at::Tensor attention(const Forward& c) {
  static const auto op = find<ForwardSignature<at::Tensor>>("qkv::attention");
  const AttentionOptions& o = c.options;
  return op.call(c.query, c.key, c.value, o.attn_mask(), o.dropout_p(), o.is_causal(), o.scale(),
                 o.enable_gqa());
}

OutputAndLse attention_with_lse(const Forward& c) {
  const AttentionOptions& o = c.options;
  return with_lse().call(c.query, c.key, c.value, o.attn_mask(), o.dropout_p(), o.is_causal(),
                         o.scale(), o.enable_gqa());
}

OutputAndLse attention_with_lse(c10::DispatchKeySet keys, const Forward& c) {
  const AttentionOptions& o = c.options;
  return with_lse().redispatch(keys, c.query, c.key, c.value, o.attn_mask(), o.dropout_p(),
                               o.is_causal(), o.scale(), o.enable_gqa());
}

Gradients attention_backward(const Backward& c) {
  const Forward& f = c.forward;
  const AttentionOptions& o = f.options;
  return backward().call(c.grad_output, c.grad_lse, f.query, f.key, f.value, o.attn_mask(),
                         c.output, c.lse, o.dropout_p(), o.is_causal(), o.scale(), o.enable_gqa(),
                         c.output_mask);
}

Gradients attention_backward(c10::DispatchKeySet keys, const Backward& c) {
  const Forward& f = c.forward;
  const AttentionOptions& o = f.options;
  return backward().redispatch(keys, c.grad_output, c.grad_lse, f.query, f.key, f.value,
                               o.attn_mask(), c.output, c.lse, o.dropout_p(), o.is_causal(),
                               o.scale(), o.enable_gqa(), c.output_mask);
}

}  // namespace qkv::ops
