#include "ops/linear/linear.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "autograd/run.h"
#include "call/after_fork.h"
#include "ops/linear/products.h"

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
  return x.scalar_type() == dtype && x.numel() > 0 && !x._fw_grad(0).defined();
}

// Whether the rows, or the columns, follow each other without a gap. For any other weight, a part
// of a wider one or an expanded gradient, oneDNN has a reference alone, which takes 1300 times as
// long.
bool is_dense(const Tensor& weight) { return weight.is_contiguous() || weight.t().is_contiguous(); }

// Whether these are plain tensors of one dtype, of sizes that fit together, and no scalar or empty.
bool fit(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  const Tensor& last = bias ? *bias : weight;
  if (!input.defined() || !weight.defined() || !last.defined()) return false;
  // Asked first: of others not even the sizes may be known.
  if (!is_plain(input.key_set() | weight.key_set() | last.key_set())) return false;
  const at::ScalarType dtype = input.scalar_type();
  return takes(input, dtype) && takes(weight, dtype) && takes(last, dtype) && input.dim() > 1 &&
         weight.dim() == 2 && input.size(-1) == weight.size(1) &&
         (!bias || bias->sizes() == weight.sizes().slice(0, 1));
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

// A product, as `projected` has it, or the gradient of a weight [N, K], which is one of the
// output's gradient [N, M] and the input [K, M], both transposed.
Tensor multiplied(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                  bool is_gradient);
// The same as one operator of a graph.
Tensor recorded(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                bool is_gradient) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("qkv::_product", "")
                             .typed<decltype(recorded)>();
  return op.call(input, weight, bias, is_gradient);
}

// Its gradients are products, which are differentiable in turn. In a graph all are recorded.
template <bool kInGraph>
struct Linear : torch::autograd::Function<Linear<kInGraph>> {
  static constexpr bool is_traceable = true;  // by compiled autograd

  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& input,
                        const Tensor& weight, const OptionalTensor& bias) {
    // Only what a gradient is made of: beside a frozen weight nobody keeps the input, which may be
    // written to then, as it may be an inference tensor.
    context->save_for_backward(
        {weight.requires_grad() ? input : Tensor(), input.requires_grad() ? weight : Tensor()});
    context->saved_data["has_bias"] = bias.has_value();
    if (!kInGraph) return product(input, weight, bias);
    const at::AutoDispatchBelowADInplaceOrView below;
    return recorded(input, weight, bias, false);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const Tensor &grad = grads[0], &input = saved[0], &weight = saved[1];
    torch::autograd::variable_list results(3);
    if (!grad.defined()) return results;
    // Of a vector, which has no rows, the one that it is.
    const auto rows_of = [](const Tensor& x) { return at::atleast_2d(x).flatten(0, -2); };
    const Tensor rows = rows_of(grad);
    const auto multiply = kInGraph ? recorded : multiplied;
    if (context->needs_input_grad(0)) results[0] = multiply(grad, weight.t(), std::nullopt, false);
    if (context->needs_input_grad(1))
      results[1] = multiply(rows.t(), rows_of(input).t(), std::nullopt, true);
    const bool has_bias = context->saved_data["has_bias"].toBool();
    if (has_bias && context->needs_input_grad(2)) results[2] = rows.sum(0);
    return results;
  }
};

Tensor multiplied(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                  bool is_gradient) {
  const OneThreadAfterFork one_thread;
  const WhoMultiplies& who = who_multiplies();
  // A gradient is made transposed where N > K, because oneDNN is faster with a result of fewer rows
  // than columns: on two cores of a Zen 5, with M of 4096, N of 2304 and K of 768, 331 GFLOP/s
  // beside 243. Of few rows M, putting the result back takes longer than that saves.
  constexpr int64_t kManyRows = 1024;
  if (is_gradient && who.weights != kNever && input.size(0) > weight.size(0) &&
      input.size(1) >= kManyRows)
    return multiplied(weight, input, std::nullopt, true).t().contiguous();
  if (!fit(input, weight, bias) ||
      (!are_few_rows(input, weight) &&
       !fits_onednn(input, weight, is_gradient ? who.weights : who.outputs)))
    return at::linear(input, weight, bias);
  if (!at::GradMode::is_enabled()) return product(input, weight, bias);
  return Linear<false>::apply(input, weight, bias);
}

// Kernels of the recorded operator.
Tensor by_torch(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, bool) {
  return at::linear(input, weight, bias);
}
Tensor differentiable(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, bool) {
  for (const Tensor& x : {input, weight, bias.value_or(Tensor())})  // forward mode and torch.func
    if (x.defined() &&
        (x._fw_grad(0).defined() || x.key_set().has(c10::DispatchKey::FuncTorchGradWrapper)))
      return at::linear(input, weight, bias);
  return Linear<true>::apply(input, weight, bias);
}

}  // namespace

Tensor projected(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  return multiplied(input, weight, bias, false);
}

TORCH_LIBRARY_FRAGMENT(qkv, m) {
  m.def("_linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor");
  m.impl("_linear",
         torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(projected)));
  // For programs that are compiled: who multiplies is decided when they run, by sizes that may not
  // be known before.
  m.def(
      "_product(Tensor input, Tensor weight, Tensor? bias=None, bool is_gradient=False) -> Tensor");
  m.impl("_product", torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(multiplied)));
  m.impl("_product", torch::dispatch(c10::DispatchKey::Autograd, TORCH_FN(differentiable)));
  for (const auto key :
       {c10::DispatchKey::Meta, c10::DispatchKey::AutocastCPU, c10::DispatchKey::FuncTorchBatched})
    m.impl("_product", torch::dispatch(key, TORCH_FN(by_torch)));
}

}  // namespace qkv::ops
