#include "ops/linear/linear.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/linear.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "autograd/run.h"
#include "call/after_fork.h"
#include "ops/linear/few_rows.h"
#include "ops/linear/who_multiplies.h"

namespace qkv::ops {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Scalars = torch::List<std::optional<at::Scalar>>;
using Product = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, c10::string_view,
                       Scalars, std::optional<c10::string_view>);

// oneDNN's product, which has no derivatives.
const c10::TypedOperatorHandle<Product>& onednn() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("mkldnn::_linear_pointwise", "")
                             .typed<Product>();
  return op;
}

bool takes(const Tensor& x, at::ScalarType dtype) {
  return x.defined() && x.scalar_type() == dtype && x.numel() > 0 && !x._fw_grad(0).defined();
}

// Whether the rows, or the columns, follow each other without a gap. For any other weight, a part
// of a wider one or an expanded gradient, oneDNN has a reference alone, which takes 1300 times as
// long.
bool is_dense(const Tensor& weight) { return weight.is_contiguous() || weight.t().is_contiguous(); }

// Whether these are plain tensors of one dtype, of sizes that fit together, and no scalar or empty.
bool fit(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  if (!input.defined()) return false;
  const at::ScalarType dtype = input.scalar_type();
  if (!takes(input, dtype) || !takes(weight, dtype) || (bias && !takes(*bias, dtype))) return false;
  const auto keys = input.key_set() | weight.key_set() | (bias ? *bias : weight).key_set();
  return input.dim() > 1 && weight.dim() == 2 && input.size(-1) == weight.size(1) &&
         (!bias || bias->sizes() == weight.sizes().slice(0, 1)) && is_plain(keys);
}

bool fits_onednn(const Tensor& input, const Tensor& weight, int64_t least) {
  return least != kNever && input.scalar_type() == at::kFloat && is_dense(weight) &&
         input.numel() * weight.size(0) >= least && at::globalContext().userEnabledMkldnn();
}

Tensor product(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (are_few_rows(input, weight)) return few_rows(input, weight, bias);
  // torch tells oneDNN a bias's size alone: its elements are read as neighbours.
  const OptionalTensor packed = bias ? OptionalTensor(bias->contiguous()) : bias;
  return onednn().call(input, weight, packed, "none", Scalars(), "");
}

Tensor multiplied(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                  int64_t least);

// The gradient of a weight [N, K] by the output's gradient, rows [M, N], and the input [M, K]. It
// is made transposed where N > K, because oneDNN is faster with a result of fewer rows than
// columns: on two cores of a Zen 5, with M of 4096, N of 2304 and K of 768, 331 GFLOP/s beside 243.
// Of few rows, putting the result back takes longer than that saves.
Tensor weight_gradient(const Tensor& rows, const Tensor& input) {
  constexpr int64_t kManyRows = 1024;
  const int64_t least_weight = who_multiplies().weights;
  if (rows.size(1) <= input.size(1) || rows.size(0) < kManyRows || least_weight == kNever)
    return multiplied(rows.t(), input.t(), std::nullopt, least_weight);
  return multiplied(input.t(), rows.t(), std::nullopt, least_weight).t().contiguous();
}

// Its gradients are products, which are differentiable in turn.
struct Linear : torch::autograd::Function<Linear> {
  static constexpr bool is_traceable = true;  // by compiled autograd

  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& input,
                        const Tensor& weight, const OptionalTensor& bias) {
    // Only what a gradient is made of: beside a frozen weight nobody keeps the input, which may be
    // written to then, as it may be an inference tensor.
    context->save_for_backward(
        {weight.requires_grad() ? input : Tensor(), input.requires_grad() ? weight : Tensor()});
    context->saved_data["has_bias"] = bias.has_value();
    return product(input, weight, bias);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const Tensor &grad = grads[0], &input = saved[0], &weight = saved[1];
    torch::autograd::variable_list results(3);
    if (!grad.defined()) return results;
    const Tensor rows = grad.flatten(0, -2);
    if (context->needs_input_grad(0)) results[0] = projected(grad, weight.t(), std::nullopt);
    if (context->needs_input_grad(1)) results[1] = weight_gradient(rows, input.flatten(0, -2));
    const bool has_bias = context->saved_data["has_bias"].toBool();
    if (has_bias && context->needs_input_grad(2)) results[2] = rows.sum(0);
    return results;
  }
};

Tensor multiplied(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                  int64_t least) {
  const OneThreadAfterFork one_thread;
  if (!fit(input, weight, bias) ||
      (!are_few_rows(input, weight) && !fits_onednn(input, weight, least)))
    return at::linear(input, weight, bias);
  if (!at::GradMode::is_enabled()) return product(input, weight, bias);
  return Linear::apply(input, weight, bias);
}

}  // namespace

Tensor projected(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  return multiplied(input, weight, bias, who_multiplies().outputs);
}

TORCH_LIBRARY_FRAGMENT(qkv, m) {
  m.def("_linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor");
  m.impl("_linear",
         torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(projected)));
}

}  // namespace qkv::ops
