#include "reference.h"

#include <ATen/ExpandUtils.h>
#include <c10/util/accumulate.h>

#include "reference/reference.h"

namespace qkv::test {
namespace {

using torch::autograd::variable_list;
using OptionalTensor = std::optional<at::Tensor>;

// What a call reads: query [N, H, L, D], key [N, H, S, D], value [N, H, S, Dv], and undefined or
// mask and bias [N, H, L, S], alibi_slopes and sinks [N, H, 1, 1]. All are float64 but for a
// boolean mask.
enum { kQuery, kKey, kValue, kMask, kBias, kSlopes, kSinks };

Strides strides_of(const at::Tensor& t) {
  Strides strides;
  strides.batch[0] = t.stride(0), strides.head = t.stride(1);
  strides.row = t.stride(2), strides.col = t.stride(3);
  return strides;
}

Input input(const at::Tensor& t) {
  return t.defined() ? Input{t.const_data_ptr(), strides_of(t)} : Input{};
}
Output output(const at::Tensor& t) {
  return t.defined() ? Output{t.mutable_data_ptr(), strides_of(t)} : Output{};
}

Problem describe(const variable_list& tensors, const AttentionOptions& options) {
  const at::Tensor &query = tensors[kQuery], &value = tensors[kValue];
  Problem p;
  p.dtype = DType::f64;
  p.batch_rank = 1, p.batch_sizes[0] = query.size(0);
  p.heads = p.kv_heads = query.size(1);
  p.seqlen_q = query.size(2), p.seqlen_k = value.size(2);
  p.head_dim = query.size(3), p.head_dim_v = value.size(3);
  p.scale = options.scale().value_or(1 / std::sqrt(double(p.head_dim)));
  p.is_causal = options.is_causal();
  if (const auto& window = options.window_size())
    p.window_left = (*window)[0], p.window_right = (*window)[1];
  p.softcap = options.softcap();
  p.query = input(query), p.key = input(tensors[kKey]), p.value = input(value);
  for (int m = 0; m < kMasks; ++m) {
    const at::Tensor& mask = tensors[kMask + m];
    if (!mask.defined()) continue;
    const bool is_bool = mask.scalar_type() == at::kBool;
    p.masks[m] = {is_bool ? MaskType::boolean : MaskType::f64, input(mask)};
  }
  p.by_head[qkv::kAlibiSlopes] = input(tensors[kSlopes]);
  p.by_head[qkv::kSinks] = input(tensors[kSinks]);
  return p;
}

struct Options : torch::CustomClassHolder {
  explicit Options(const AttentionOptions& options) : options(options) {}
  AttentionOptions options;
};

// The output [N, H, L, Dv] and the lse [N, H, L, 1] of `tensors`.
class Attention : public torch::autograd::Function<Attention> {
 public:
  static variable_list forward(torch::autograd::AutogradContext* context, const at::Tensor& query,
                               const at::Tensor& key, const at::Tensor& value, OptionalTensor mask,
                               OptionalTensor bias, OptionalTensor slopes, OptionalTensor sinks,
                               const AttentionOptions& options) {
    const auto or_none = [](const OptionalTensor& t) { return t.value_or(at::Tensor()); };
    const variable_list inputs = {
        query, key, value, or_none(mask), or_none(bias), or_none(slopes), or_none(sinks)};
    const Problem p = describe(inputs, options);
    at::Tensor result = at::empty({p.batch(), p.heads, p.seqlen_q, p.head_dim_v}, at::kDouble);
    at::Tensor lse = at::empty({p.batch(), p.heads, p.seqlen_q, 1}, at::kDouble);
    reference::attention_forward(p, {output(result), output(lse)});
    variable_list saved = inputs;
    saved.insert(saved.end(), {result, lse});
    context->save_for_backward(saved);
    context->saved_data["options"] =
        c10::IValue::make_capsule(c10::make_intrusive<Options>(options));
    return {result, lse};
  }

  static variable_list backward(torch::autograd::AutogradContext* context, variable_list grads) {
    const variable_list saved = context->get_saved_variables();
    const auto held = context->saved_data["options"].toCapsule();
    const Problem p = describe(saved, static_cast<const Options&>(*held).options);
    variable_list found(kSinks + 1);
    for (size_t i = 0; i < found.size(); ++i)
      if (saved[i].defined() && saved[i].is_floating_point())
        found[i] = at::zeros(saved[i].sizes(), at::kDouble);
    BackwardArgs a;
    a.output = input(saved[kSinks + 1]), a.lse = input(saved[kSinks + 2]);
    a.grad_output = input(grads[0]), a.grad_lse = input(grads[1]);
    a.grad_query = output(found[kQuery]), a.grad_key = output(found[kKey]);
    a.grad_value = output(found[kValue]);
    for (int m = 0; m < kMasks; ++m) a.grad_masks[m].each = output(found[kMask + m]);
    a.grad_by_head[qkv::kAlibiSlopes] = output(found[kSlopes]);
    a.grad_by_head[qkv::kSinks] = output(found[kSinks]);
    reference::attention_backward(p, a);
    found.emplace_back();  // of the options
    return found;
  }
};

at::Tensor all_heads(const at::Tensor& t, const at::Tensor& query,
                     const AttentionOptions& options) {
  return options.enable_gqa() ? t.repeat_interleave(query.size(-3) / t.size(-3), -3) : t;
}

// Expanded to [lead..., its last two dimensions], and the batch made one dimension.
at::Tensor planes(const at::Tensor& t, std::vector<int64_t> lead, int64_t rows, int64_t cols) {
  const int64_t heads = lead.empty() ? 1 : lead.back();
  const int64_t batch = lead.empty() ? 1 : c10::multiply_integers(lead.begin(), lead.end() - 1);
  lead.insert(lead.end(), {rows, cols});
  const at::Tensor wide = t.is_floating_point() ? t.to(at::kDouble) : t;
  return wide.expand(lead).reshape({batch, heads, rows, cols});
}

// bool [..., L, S]: whether one of a query's spans [..., L, 2 n] has the key.
at::Tensor in_spans(const at::Tensor& spans, int64_t S) {
  const at::Tensor ends = spans.unflatten(-1, {-1, 2}).unsqueeze(-1), keys = at::arange(S);
  return (ends.select(-2, 0) <= keys).logical_and(ends.select(-2, 1) > keys).any(-2);
}

// The leading dimensions of a call, and its tensors as Attention takes them.
struct Call {
  Call(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
       const AttentionOptions& options) {
    const at::Tensor keys = all_heads(key, query, options),
                     values = all_heads(value, query, options);
    const auto leading = [](const at::Tensor& t) { return t.sizes().slice(0, t.dim() - 2); };
    lead = at::infer_size(at::infer_size(leading(query), leading(keys)), leading(values));
    const int64_t L = query.size(-2), S = key.size(-2), D = query.size(-1);
    tensors = {planes(query, lead, L, D),
               planes(keys, lead, S, D),
               planes(values, lead, S, value.size(-1)),
               {},
               {},
               {},
               {}};
    if (const auto& mask = options.attn_mask()) tensors[kMask] = planes(*mask, lead, L, S);
    // As a boolean mask, beside which there is no other one.
    if (const auto& spans = options.spans())
      tensors[kMask] = planes(in_spans(*spans, S), lead, L, S);
    if (const auto& bias = options.bias()) tensors[kBias] = planes(*bias, lead, L, S);
    if (const auto& slopes = options.alibi_slopes())
      tensors[kSlopes] = planes(slopes->unsqueeze(-1).unsqueeze(-1), lead, 1, 1);
    if (const auto& sinks = options.sinks())
      tensors[kSinks] = planes(sinks->unsqueeze(-1).unsqueeze(-1), lead, 1, 1);
  }

  // [N, H, rows...] with the leading dimensions of the call.
  at::Tensor unfold(const at::Tensor& t) const {
    std::vector<int64_t> sizes = lead;
    for (int64_t d = 2; d < t.dim(); ++d) sizes.push_back(t.size(d));
    return t.reshape(sizes);
  }

  std::vector<int64_t> lead;
  variable_list tensors;
};

}  // namespace

std::tuple<at::Tensor, at::Tensor> reference(const at::Tensor& query, const at::Tensor& key,
                                             const at::Tensor& value,
                                             const AttentionOptions& options) {
  const Call call(query, key, value, options);
  const variable_list& t = call.tensors;
  const auto given = [&](int n) { return t[n].defined() ? OptionalTensor(t[n]) : std::nullopt; };
  const variable_list found =
      Attention::apply(t[kQuery], t[kKey], t[kValue], given(kMask), given(kBias), given(kSlopes),
                       given(kSinks), options);
  const auto dtype = query.scalar_type();
  return {call.unfold(found[0]).to(dtype), call.unfold(found[1].squeeze(-1)).to(dtype)};
}

// The output of attention for values that tell the keys apart.
at::Tensor reference_weights(const at::Tensor& query, const at::Tensor& key,
                             const AttentionOptions& options) {
  const auto eye = at::eye(key.size(-2), key.options().requires_grad(false));
  std::vector<int64_t> sizes = key.sizes().vec();
  sizes.back() = key.size(-2);
  return std::get<0>(reference(query, key, eye.expand(sizes), options));
}

std::tuple<at::Tensor, at::Tensor> reference_hard(const at::Tensor& query, const at::Tensor& key,
                                                  const at::Tensor& value,
                                                  const AttentionOptions& options) {
  const Call call(query, key, value, options);
  const Problem p = describe(call.tensors, options);
  at::Tensor best = at::empty({p.batch(), p.heads, p.seqlen_q, 1}, at::kLong);
  reference::attention_hard(p, {{}, output(best)});
  const at::Tensor chosen =
      at::gather(call.tensors[kValue], 2, best.expand({-1, -1, -1, p.head_dim_v}));
  return {call.unfold(chosen).to(value.scalar_type()), call.unfold(best.squeeze(-1))};
}

}  // namespace qkv::test
