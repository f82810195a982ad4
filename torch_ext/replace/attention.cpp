#include <ATen/ATen.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>

#include "call/check.h"
#include "call/dtypes.h"
#include "call/from_options.h"
#include "ops/attention/attention.h"
#include "qkv/attention.h"
#include "replace/kernels.h"

namespace qkv::replace {
namespace {

// Whether attention refuses the call: a second look, after an error, at all that it checks.
bool is_refused(Call call) {
  const double p = call.options.dropout_p;
  if (!(p >= 0 && p <= 1)) return true;
  call.options.dropout_p = 0;  // there is no seed yet
  try {
    check<c10::SymInt>(call);
  } catch (const c10::Error&) {
    return true;
  }
  return false;
}

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& attn_mask, double dropout_p, bool is_causal,
                     std::optional<double> scale, bool enable_gqa) {
  Outcome outcome = outcome_of(query);
  if (query.is_nested()) outcome = Outcome::nested;
  if (outcome == Outcome::taken) {
    const auto options = AttentionOptions()
                             .attn_mask(attn_mask)
                             .dropout_p(dropout_p)
                             .is_causal(is_causal)
                             .scale(scale)
                             .enable_gqa(enable_gqa);
    try {
      at::Tensor output = qkv::attention(query, key, value, options);
      count(Function::attention, Outcome::taken);
      return output;
    } catch (const c10::Error&) {
      if (!is_refused(call_of(ops::attention_forward, query, key, value, options))) throw;
      outcome = Outcome::refused;
    }
  }
  count(Function::attention, outcome);
  return at::native::scaled_dot_product_attention(query, key, value, attn_mask, dropout_p,
                                                  is_causal, scale, enable_gqa);
}

}  // namespace

Outcome outcome_of(const at::Tensor& query) {
  if (!query.device().is_cpu()) return Outcome::elsewhere;
  // torch's fused kernel for CPUs, which qkv takes the place of, goes by flash attention's switch.
  if (!at::globalContext().userEnabledFlashSDP()) return Outcome::no_flash;
  return dtype_of(query.scalar_type()) ? Outcome::taken : Outcome::dtype;
}

torch::CppFunction attention_kernel() { return torch::CppFunction(TORCH_FN(attention)); }

}  // namespace qkv::replace
