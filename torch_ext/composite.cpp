// Dispatch keys CompositeImplicitAutograd and AutocastCPU: the users' operators. On another device
// than the CPU, qkv::attention is torch's own.
#include "composite.h"

#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/library.h>

#include "autocast.h"
#include "check.h"
#include "kvcache.h"
#include "ops.h"

namespace qkv {
namespace composite {
namespace {

// The rest is checked by the operators that follow.
void check_query(const Forward& call) {
  TORCH_CHECK(call.query().defined(), call.op, ": query is an undefined tensor");
}

bool is_elsewhere(const Forward& call) {
  const at::Device device = call.query().device();
  return !device.is_cpu() && !device.is_meta();
}

// What torch's attention, which computes what is_elsewhere, has no words for.
void refuse_elsewhere(const Forward& call, bool wanted, const char* what) {
  TORCH_CHECK_NOT_IMPLEMENTED(!wanted, "attention: query is on ", call.query().device(),
                              ", where torch's attention computes the result, and that cannot ",
                              what);
}

at::Tensor torch_attention(const Forward& call) {
  check_tensors(call);
  const Options& o = call.options;
  const auto refuse = [&](bool wanted, const char* what) { refuse_elsewhere(call, wanted, what); };
  const at::Tensor& mask = call.attn_mask();
  refuse(mask.defined() && o.is_causal, "combine attn_mask with is_causal; pass one mask");
  refuse(!(o.window_size[0] == -1 && o.window_size[1] == -1), "do window_size; pass an attn_mask");
  refuse(o.softcap != 0, "do softcap");
  refuse(call[kAlibiSlopes].defined(), "do alibi_slopes; pass an attn_mask");
  refuse(call[kSinks].defined(), "do sinks");
  return at::scaled_dot_product_attention(call.query(), call.key(), call.value(), optional(mask),
                                          o.dropout_p, o.is_causal, o.scale, o.enable_gqa);
}

// What run(call with its seed) returns.
template <class Run>
auto with_seed(Forward call, const Run& run) {
  if (!(call.options.dropout_p > 0)) return run(call);
  const at::Tensor seed = ops::dropout_seed(call.query());
  call.tensors[kDropoutSeed] = &seed;
  return run(call);
}

OutputAndLse attend(const Forward& call, bool wants_lse) {
  const Autocast autocast(call);
  return with_seed(
      *autocast, [&](const Forward& seeded) { return ops::attention_forward(seeded, wants_lse); });
}

OutputAndLse attend_to_pages(const Forward& call, const at::Tensor& block_table) {
  TORCH_CHECK_VALUE(call.options.dropout_p == 0, call.op, ": dropout_p is ", call.options.dropout_p,
                    ", but 0 is expected with block_table, which is for inference only");
  TORCH_CHECK(call[kSequsedK].defined(), call.op,
              ": block_table is given, but seqused_k is None; expected how many keys of its blocks "
              "each document has");
  const Autocast autocast(call);
  return kvcache::varlen_attention_paged({*autocast, block_table});
}

}  // namespace

at::Tensor attention(const Forward& call) {
  check_query(call);
  if (is_elsewhere(call)) return torch_attention(call);
  return std::get<0>(attend(call, /*wants_lse=*/false));
}

OutputAndLse attention_with_lse(const Forward& call) {
  check_query(call);
  refuse_elsewhere(call, is_elsewhere(call), "return the log-sum-exp");
  return attend(call, /*wants_lse=*/true);
}

OutputAndLse varlen_attention(const Forward& call, const at::Tensor& block_table) {
  check_query(call);
  TORCH_CHECK(call.is_packed(), call.op, ": cu_seq_q is an undefined tensor");
  if (block_table.defined()) return attend_to_pages(call, block_table);
  return attend(call, /*wants_lse=*/true);
}

at::Tensor attention_weights(const Weights& call) {
  check_query(call.forward);
  const Autocast autocast(call.forward);
  return with_seed(*autocast, [&](const Forward& seeded) {
    return std::get<0>(ops::weights_forward({seeded, call.reduce}));
  });
}

OutputAndIndex hard_attention(const Hard& call) {
  check_query(call.forward);
  const Autocast autocast(call.forward);
  return ops::hard_forward({*autocast, call.straight_through});
}

}  // namespace composite

namespace {

Forward attention_args(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                       const OptionalTensor& attn_mask, double dropout_p, bool is_causal,
                       std::optional<double> scale, bool enable_gqa,
                       at::OptionalSymIntArrayRef window_size, double softcap,
                       const OptionalTensor& alibi_slopes, const OptionalTensor& sinks) {
  return {"attention",
          {&query, &key, &value, &tensor_of(attn_mask), &tensor_of(alibi_slopes), &tensor_of(sinks),
           &kNone, &kNone, &kNone, &kNone},
          {dropout_p, is_causal, scale, enable_gqa, ops::window_of(window_size), softcap}};
}

// The kernels read the lengths themselves: the largest ones are only checked, where known.
OutputAndLse varlen_attention(const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, const at::Tensor& cu_seq_q,
                              const OptionalTensor& cu_seq_k, c10::SymInt max_q, c10::SymInt max_k,
                              double dropout_p, std::optional<double> scale,
                              at::OptionalSymIntArrayRef window_size, bool enable_gqa,
                              const OptionalTensor& seqused_k, const OptionalTensor& block_table,
                              double softcap, const OptionalTensor& alibi_slopes,
                              const OptionalTensor& sinks) {
  const Forward call{"varlen_attention",
                     {&query, &key, &value, &kNone, &tensor_of(alibi_slopes), &tensor_of(sinks),
                      &kNone, &cu_seq_q, &tensor_of(cu_seq_k), &tensor_of(seqused_k)},
                     {dropout_p, false, scale, enable_gqa, ops::window_of(window_size), softcap}};
  for (const auto& [name, size] : {std::pair("max_q", &max_q), std::pair("max_k", &max_k)})
    TORCH_CHECK_VALUE(size->maybe_as_int().value_or(0) >= 0, call.op, ": ", name, " is ", *size,
                      ", but the largest number of rows of a document is expected");
  return composite::varlen_attention(call, tensor_of(block_table));
}

Weights attention_weights_args(const at::Tensor& query, const at::Tensor& key,
                               const OptionalTensor& attn_mask, double dropout_p, bool is_causal,
                               std::optional<double> scale, bool enable_gqa,
                               at::OptionalSymIntArrayRef window_size, double softcap,
                               const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                               std::optional<std::string_view> reduce) {
  return ops::weights_args(query, key, attn_mask, alibi_slopes, sinks, std::nullopt, dropout_p,
                           is_causal, scale, enable_gqa, window_size, softcap, reduce);
}

Hard hard_attention_args(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const OptionalTensor& attn_mask, bool is_causal,
                         std::optional<double> scale, bool enable_gqa,
                         at::OptionalSymIntArrayRef window_size, double softcap,
                         const OptionalTensor& alibi_slopes, bool straight_through) {
  return ops::hard_args(query, key, value, attn_mask, alibi_slopes, is_causal, scale, enable_gqa,
                        window_size, softcap, straight_through);
}

}  // namespace

OutputAndLse forward_autocast(const Forward& call) {
  const Autocast autocast(call);
  return ops::attention_forward(*autocast);
}

void implement_all(torch::Library& m) {
  using ops::Adapter;
  m.impl("attention", Adapter<&attention_args, &composite::attention>::call);
  m.impl("attention_with_lse", Adapter<&attention_args, &composite::attention_with_lse>::call);
  m.impl("varlen_attention", &varlen_attention);
  m.impl("attention_weights",
         Adapter<&attention_weights_args, &composite::attention_weights>::call);
  m.impl("hard_attention", Adapter<&hard_attention_args, &composite::hard_attention>::call);
}

TORCH_LIBRARY_IMPL(qkv, CompositeImplicitAutograd, m) { implement_all(m); }
// Above the keys of autograd and of Python's modes, as torch has it.
TORCH_LIBRARY_IMPL(qkv, AutocastCPU, m) {
  implement_all(m);
  // For those who call it themselves: jagged.py.
  m.impl("attention_forward", ops::Adapter<&ops::forward_args, &forward_autocast>::call);
}

}  // namespace qkv
