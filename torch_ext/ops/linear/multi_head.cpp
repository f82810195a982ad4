#include "ops/linear/multi_head.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include "autograd/run.h"
#include "ops/linear/linear.h"
#include "qkv/attention.h"

namespace qkv::ops {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Inputs MultiHead::project(const Inputs& inputs, int64_t rows) const {
  const auto& [query, key, value] = inputs;
  const bool is_one = in_weights.size() == 1, twice = is_one && key.is_same(value);
  const int64_t E = out_weight.size(1);
  Inputs found;
  for (int64_t at = 0, count; at < 3; at += count) {
    count = at == 0 ? (twice && query.is_same(key) ? 3 : 1) : at == 1 && twice ? 2 : 1;
    // Gradients of a part are copied into the whole, and so they would be of a part that is all.
    const auto part = [&](const Tensor& x) {
      return count == 3 ? x : x.narrow(0, at * E, count * E);
    };
    const OptionalTensor bias = in_bias ? OptionalTensor(part(*in_bias)) : std::nullopt;
    const Tensor product =
        ops::projected(inputs[at], is_one ? part(in_weights[0]) : in_weights[at], bias);
    // Taken apart as they lie: so their gradients become that of the product by one copy.
    int64_t next = at;
    for (const Tensor& one : product.unflatten(-1, {count, heads, -1}).unbind(-3))
      found[next++] = one.movedim(rows, -2);
  }
  return found;
}

std::tuple<Tensor, Tensor> MultiHead::attend(const Inputs& projected, int64_t rows,
                                             bool need_weights, bool average,
                                             const AttentionOptions& options) const {
  const auto& [query, key, value] = projected;
  if (!need_weights) return {merge(attention(query, key, value, options), rows), Tensor()};
  const auto reduce = average ? std::optional<std::string_view>("heads") : std::nullopt;
  const auto [output, weights] = attention_with_weights(query, key, value, options, reduce);
  return {merge(output, rows), weights};
}

Tensor MultiHead::merge(const Tensor& output, int64_t rows) const {
  return ops::projected(output.movedim(-2, rows).flatten(-2), out_weight, out_bias);
}

namespace {

std::tuple<Tensor, Tensor> multi_head(
    const Tensor& query, const Tensor& key, const Tensor& value, int64_t heads,
    at::TensorList in_weights, const OptionalTensor& in_bias, const Tensor& out_weight,
    const OptionalTensor& out_bias, int64_t rows, bool need_weights, bool average,
    const OptionalTensor& attn_mask, double dropout_p, bool is_causal, std::optional<double> scale,
    at::OptionalIntArrayRef window_size, double softcap, const OptionalTensor& alibi_slopes,
    const OptionalTensor& bias, const OptionalTensor& spans, const OptionalTensor& sinks) {
  TORCH_CHECK(in_weights.size() == 1 || in_weights.size() == 3, "in_weights has ",
              in_weights.size(), " tensors, but 1 or 3 are expected");
  AttentionOptions options;
  options.attn_mask(attn_mask).dropout_p(dropout_p).is_causal(is_causal).scale(scale);
  options.softcap(softcap).alibi_slopes(alibi_slopes).bias(bias).spans(spans).sinks(sinks);
  if (window_size) {
    TORCH_CHECK_VALUE(window_size->size() == 2, "MultiheadAttention: window_size is ", *window_size,
                      ", but two numbers are expected: (left, right), -1 for an open side");
    options.window_size({{(*window_size)[0], (*window_size)[1]}});
  }
  const MultiHead layer{heads, in_weights, in_bias, out_weight, out_bias};
  // To see to each view takes autograd a sixth of the time of 16 tokens of width 64 (Zen 4).
  std::optional<at::AutoDispatchBelowADInplaceOrView> below;
  if (are_constant({query, key, value, in_weights[0], in_weights[in_weights.size() / 2],
                    in_weights.back(), tensor_of(in_bias), out_weight, tensor_of(out_bias),
                    tensor_of(attn_mask), tensor_of(alibi_slopes), tensor_of(bias),
                    tensor_of(sinks)}))
    below.emplace();
  const Inputs projected = layer.project({query, key, value}, rows);
  return layer.attend(projected, rows, need_weights, average, options);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(qkv, m) {
  m.def(
      "_multi_head(Tensor query, Tensor key, Tensor value, int heads, Tensor[] in_weights, "
      "Tensor? in_bias, Tensor out_weight, Tensor? out_bias, int rows, bool need_weights, "
      "bool average, *, Tensor? attn_mask=None, float dropout_p=0., bool is_causal=False, "
      "float? scale=None, int[2]? window_size=None, float softcap=0., Tensor? alibi_slopes=None, "
      "Tensor? bias=None, Tensor? spans=None, Tensor? sinks=None) -> (Tensor, Tensor)",
      torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(multi_head)));
}

}  // namespace qkv::ops
