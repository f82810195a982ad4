// attention_with_kvcache and varlen_attention_paged on the other dispatch keys: inference only.
#include <c10/core/SymInt.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "autocast.h"
#include "derivatives.h"
#include "kvcache.h"
#include "layout.h"
#include "operator.h"
#include "ops.h"

namespace qkv {
namespace kvcache {
namespace {

// Key and value are pools that the query reads: k_cache and v_cache.
constexpr const char* kNames[kArguments] = {"query",        "k_cache",  "v_cache",      "attn_mask",
                                            "alibi_slopes", "sinks",    "dropout_seed", "cu_seq_q",
                                            "cu_seq_k",     "seqused_k"};
constexpr const char* kHint = "call it under torch.no_grad() or detach() that";

std::array<c10::SymInt, 2> window_of(at::OptionalSymIntArrayRef window_size, bool causal) {
  auto window = ops::window_of(window_size);
  if (causal) window[1] = 0;
  return window;
}

OutputAndLse kvcache_meta(const KvCache& call) {
  return empty_results(call.forward, check<c10::SymInt>(call));
}

OutputAndLse paged_varlen_meta(const PagedVarlen& call) {
  return empty_results(call.forward, check<c10::SymInt>(call));
}

OutputAndLse kvcache_autograd(c10::DispatchKeySet keys, const KvCache& call) {
  const Forward& f = call.forward;
  autograd::check_python_tensors(f);
  const std::array tensors = {&f.query(),  &f.key(),         &f.value(), &call.key,
                              &call.value, &f[kAlibiSlopes], &f[kSinks]};
  autograd::refuse_tangents(f.op, tensors);
  autograd::refuse_gradients(
      f.op, tensors, {"query", "k_cache", "v_cache", "key", "value", "alibi_slopes", "sinks"},
      kHint);
  return attention_with_kvcache(keys & c10::after_autograd_keyset, call);
}

OutputAndLse paged_varlen_autograd(c10::DispatchKeySet keys, const PagedVarlen& call) {
  const Forward& f = call.forward;
  autograd::check_python_tensors(f);
  const std::array tensors = {&f.query(), &f.key(), &f.value(), &f[kAlibiSlopes], &f[kSinks]};
  autograd::refuse_tangents(f.op, tensors);
  autograd::refuse_gradients(f.op, tensors, {"query", "key", "value", "alibi_slopes", "sinks"},
                             "with block_table, call it under torch.no_grad() or detach() that");
  return varlen_attention_paged(keys & c10::after_autograd_keyset, call);
}

// Whoever saved the caches for a backward pass is told that they have changed.
OutputAndLse kvcache_inplace(c10::DispatchKeySet keys, const KvCache& call) {
  OutputAndLse results = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return attention_with_kvcache(keys & c10::after_ADInplaceOrView_keyset, call);
  }();
  if (call.appends()) {
    torch::autograd::increment_version(call.forward.key());
    torch::autograd::increment_version(call.forward.value());
  }
  return results;
}

// Tensor.is_neg(): a view, as x.imag of a conjugate is, that says of memory that it is to be read
// with the other sign. torch hands copies on, which is right for what is only read.
OutputAndLse kvcache_negative(c10::DispatchKeySet keys, const KvCache& call) {
  constexpr c10::DispatchKeySet kBelow(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Negative);
  std::array<at::Tensor, kArguments> plain;
  Forward forward = call.forward;
  for (size_t i = 0; i < kArguments; ++i) {
    plain[i] = *forward.tensors[i];
    forward.tensors[i] = &plain[i];
    if (!plain[i].defined() || !plain[i].is_neg()) continue;
    TORCH_CHECK(!call.appends() || (i != kKey && i != kValue), forward.op, ": ", kNames[i],
                " is a view that negates its memory (is_neg()), but a tensor that can be written "
                "to is expected: ",
                kNames[i], ".resolve_neg()");
    plain[i] = plain[i].resolve_neg();
  }
  const auto resolved = [](const at::Tensor& t) { return t.defined() ? t.resolve_neg() : t; };
  const at::Tensor key = resolved(call.key), value = resolved(call.value);
  const at::Tensor lengths = resolved(call.cache_seqlens), items = resolved(call.cache_batch_idx);
  const at::Tensor pad = resolved(call.cache_leftpad), table = resolved(call.block_table);
  return attention_with_kvcache(keys & kBelow, {forward, key, value, lengths, items, pad, table});
}

// query, key and value are cast; the caches are written to, so they must have that dtype.
OutputAndLse kvcache_autocast(const KvCache& call) {
  Forward tensors = call.forward;
  tensors.tensors[kKey] = &call.key;
  tensors.tensors[kValue] = &call.value;
  const Autocast autocast(tensors);
  const Forward& cast = *autocast;
  Forward forward = call.forward;
  forward.tensors[kQuery] = cast.tensors[kQuery];
  for (const Argument cache : {kKey, kValue}) {
    if (!forward[cache].defined() || !cast.query().defined()) continue;
    TORCH_CHECK(forward[cache].scalar_type() == cast.query().scalar_type(), forward.op, ": ",
                kNames[cache], " is ", name(forward[cache].scalar_type()),
                ", but autocast makes query ", name(cast.query().scalar_type()),
                "; expected caches of that dtype");
  }
  return attention_with_kvcache({forward, cast.key(), cast.value(), call.cache_seqlens,
                                 call.cache_batch_idx, call.cache_leftpad, call.block_table});
}

template <class Call>
OutputAndLse refuse(const Call& call) {
  check_tensors(call);
  check_supported(call.forward);
  TORCH_CHECK_NOT_IMPLEMENTED(false, call.forward.op, ": query is not a plain dense CPU tensor");
}

void refuse_all(torch::Library& m) {
  using ops::Adapter;
  m.impl("attention_with_kvcache", Adapter<&args, &refuse<KvCache>>::call);
  m.impl("varlen_attention_paged", Adapter<&paged_varlen_args, &refuse<PagedVarlen>>::call);
}

// invoke() with the arguments of a call as the dispatcher passes them.
template <class Invoke>
OutputAndLse pass(const KvCache& c, const Invoke& invoke) {
  const Forward& f = c.forward;
  const Options& o = f.options;
  return invoke(f.query(), f.key(), f.value(), optional(c.key), optional(c.value),
                optional(c.cache_seqlens), optional(c.cache_batch_idx), optional(c.cache_leftpad),
                optional(c.block_table), o.scale, /*causal=*/false, ops::Window(o), o.softcap,
                optional(f[kAlibiSlopes]), optional(f[kSinks]));
}

template <class Invoke>
OutputAndLse pass(const PagedVarlen& c, const Invoke& invoke) {
  const Forward& f = c.forward;
  const Options& o = f.options;
  return invoke(f.query(), f.key(), f.value(), f[kCuSeqQ], optional(f[kCuSeqK]), f[kSequsedK],
                c.block_table, o.scale, ops::Window(o), o.enable_gqa, o.softcap,
                optional(f[kAlibiSlopes]), optional(f[kSinks]));
}

const auto& kvcache_op() {
  static const auto op = ops::find_operator<OutputAndLse>("qkv::attention_with_kvcache", &args);
  return op;
}
const auto& paged_varlen_op() {
  static const auto op =
      ops::find_operator<OutputAndLse>("qkv::varlen_attention_paged", &paged_varlen_args);
  return op;
}

}  // namespace

OutputAndLse attention_with_kvcache(const KvCache& call) {
  return pass(call, [](auto&&... args) { return kvcache_op().call(args...); });
}
OutputAndLse attention_with_kvcache(c10::DispatchKeySet keys, const KvCache& call) {
  return pass(call, [&](auto&&... args) { return kvcache_op().redispatch(keys, args...); });
}
OutputAndLse varlen_attention_paged(const PagedVarlen& call) {
  return pass(call, [](auto&&... args) { return paged_varlen_op().call(args...); });
}
OutputAndLse varlen_attention_paged(c10::DispatchKeySet keys, const PagedVarlen& call) {
  return pass(call, [&](auto&&... args) { return paged_varlen_op().redispatch(keys, args...); });
}

KvCache args(const at::Tensor& query, const at::Tensor& k_cache, const at::Tensor& v_cache,
             const OptionalTensor& key, const OptionalTensor& value,
             const OptionalTensor& cache_seqlens, const OptionalTensor& cache_batch_idx,
             const OptionalTensor& cache_leftpad, const OptionalTensor& block_table,
             std::optional<double> softmax_scale, bool causal,
             at::OptionalSymIntArrayRef window_size, double softcap,
             const OptionalTensor& alibi_slopes, const OptionalTensor& sinks) {
  return {{"attention_with_kvcache",
           {&query, &k_cache, &v_cache, &kNone, &tensor_of(alibi_slopes), &tensor_of(sinks), &kNone,
            &kNone, &kNone, &kNone},
           {0, false, softmax_scale, true, window_of(window_size, causal), softcap},
           true,
           kNames},
          tensor_of(key),
          tensor_of(value),
          tensor_of(cache_seqlens),
          tensor_of(cache_batch_idx),
          tensor_of(cache_leftpad),
          tensor_of(block_table)};
}

PagedVarlen paged_varlen_args(const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, const at::Tensor& cu_seq_q,
                              const OptionalTensor& cu_seq_k, const at::Tensor& seqused_k,
                              const at::Tensor& block_table, std::optional<double> scale,
                              at::OptionalSymIntArrayRef window_size, bool enable_gqa,
                              double softcap, const OptionalTensor& alibi_slopes,
                              const OptionalTensor& sinks) {
  return {{"varlen_attention",
           {&query, &key, &value, &kNone, &tensor_of(alibi_slopes), &tensor_of(sinks), &kNone,
            &cu_seq_q, &tensor_of(cu_seq_k), &seqused_k},
           {0, false, scale, enable_gqa, ops::window_of(window_size), softcap}},
          block_table};
}

TORCH_LIBRARY_IMPL(qkv, Meta, m) {
  using ops::Adapter;
  m.impl("attention_with_kvcache", Adapter<&args, &kvcache_meta>::call);
  m.impl("varlen_attention_paged", Adapter<&paged_varlen_args, &paged_varlen_meta>::call);
}

TORCH_LIBRARY_IMPL(qkv, Autograd, m) {
  using ops::Adapter;
  m.impl("attention_with_kvcache", Adapter<&args, &kvcache_autograd>::with_keys);
  m.impl("varlen_attention_paged", Adapter<&paged_varlen_args, &paged_varlen_autograd>::with_keys);
}

TORCH_LIBRARY_IMPL(qkv, ADInplaceOrView, m) {
  using ops::Adapter;
  m.impl("attention_with_kvcache", Adapter<&args, &kvcache_inplace>::with_keys);
}

TORCH_LIBRARY_IMPL(qkv, Negative, m) {
  using ops::Adapter;
  m.impl("attention_with_kvcache", Adapter<&args, &kvcache_negative>::with_keys);
}

TORCH_LIBRARY_IMPL(qkv, AutocastCPU, m) {
  using ops::Adapter;
  m.impl("attention_with_kvcache", Adapter<&args, &kvcache_autocast>::call);
}

TORCH_LIBRARY_IMPL(qkv, CompositeExplicitAutograd, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(qkv, NestedTensorCPU, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(qkv, NestedTensorCUDA, m) { refuse_all(m); }

}  // namespace kvcache
}  // namespace qkv
