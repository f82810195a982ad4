#include <torch/csrc/autograd/VariableTypeUtils.h>

#include "autograd/run.h"
#include "call/autocast.h"
#include "call/boxed.h"
#include "call/from_options.h"
#include "ops/kvcache/kvcache.h"
#include "qkv/kvcache.h"
#include "tensors/layout.h"

namespace qkv {
namespace ops {
namespace {

Tensors meta(const Call& call) { return empty_results(call, check_kvcache<c10::SymInt>(call)); }

// query, key and value are cast; the caches are written to, so they must have that dtype, or be
// int8.
Tensors kvcache_autocast(const Call& call) {
  Call cast = call;
  const Autocast autocast(cast, {arg::query, arg::new_key, arg::new_value});
  for (const Argument cache : {arg::key, arg::value}) {
    if (!cast.has(cache) || !cast.has(arg::query)) continue;
    const at::ScalarType found = cast[cache].scalar_type(), dtype = cast[arg::query].scalar_type();
    TORCH_CHECK(found == dtype || found == at::kChar, call.title(), ": ", call.name_of(cache),
                " is ", name(found), ", but autocast makes query ", name(dtype),
                "; expected caches of that dtype");
  }
  return run(cast);
}

// Dispatch key ADInplaceOrView: whoever saved the caches for a backward pass is told that they have
// changed. In inference mode a tensor that was made outside of it, a weight say, leads here, too.
void count_writes(const Operator& op, c10::DispatchKeySet keys, boxed::Stack& stack) {
  const Call call = boxed::call_of(op, stack);
  Tensors written;
  for (const Argument argument : written_by(call)) {
    // increment_version would refuse it, too, but after the call.
    TORCH_CHECK(!call[argument].is_inference() || c10::InferenceMode::is_enabled(), call.title(),
                ": ", call.name_of(argument),
                " was made in inference mode, but with key, it is written to; call it under "
                "torch.inference_mode() or clone() that");
    written.push_back(call[argument]);
  }
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    op.handle().redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, &stack);
  }
  for (const at::Tensor& tensor : written) torch::autograd::increment_version(tensor);
}

// Dispatch key Negative, for Tensor.is_neg(): a view, as x.imag of a conjugate is, that says of
// memory that it is to be read with the other sign. torch hands copies on, which is right for what
// is only read.
void resolve_negative(const Operator& op, c10::DispatchKeySet keys, boxed::Stack& stack) {
  constexpr c10::DispatchKeySet kBelow(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Negative);
  const Call call = boxed::call_of(op, stack);
  const auto written = written_by(call);
  auto value = stack.end() - int64_t(op.parameters.size());
  for (const Parameter& p : op.parameters) {
    c10::IValue& argument = *value++;
    if (!p.is_tensor || argument.isNone() || !argument.toTensor().is_neg()) continue;
    TORCH_CHECK(std::find(written.begin(), written.end(), p.which) == written.end(), call.title(),
                ": ", p.name,
                " is a view that negates its memory (is_neg()), but a tensor that can "
                "be written to is expected: ",
                p.name, ".resolve_neg()");
    argument = argument.toTensor().resolve_neg();
  }
  op.handle().redispatchBoxed(keys & kBelow, &stack);
}

}  // namespace

DefinedOperator attention_with_kvcache(
    "attention_with_kvcache",
    "attention_with_kvcache(query, k_cache(a!) as key, v_cache(b!) as value, key?= as new_key, "
    "value?= as new_value, *, cache_seqlens?=, cache_batch_idx?=, cache_leftpad?=, block_table?=, "
    "rotary_cos?= as cos, rotary_sin?= as sin, rotary_interleaved=, softmax_scale= as scale, "
    "causal=, window_size=, " QKV_SCORE_KEYWORDS
    ", sinks?=, k_scale(c!)?= as key_scale, v_scale(d!)?= as value_scale, " QKV_PROGRAM_KEYWORDS
    ") "
    "-> output, softmax_lse as logsumexp",
    {.cpu = &kvcache_cpu,
     .meta = &meta,
     .autocast = &kvcache_autocast,
     .no_gradient = "call it under torch.no_grad() or detach() that"});

// varlen_attention with block_table [N, blocks of a document]: key and value are
// [blocks, block size, Hkv, *], document n has the first seqused_k[n] keys of its blocks.
DefinedOperator varlen_attention_paged(
    "varlen_attention",
    "varlen_attention_paged(query, key, value, cu_seq_q, cu_seq_k?, seqused_k, block_table, *, "
    "scale=, is_causal=, window_size=, enable_gqa=, " QKV_SCORE_KEYWORDS
    ", sinks?=, k_scale?= as key_scale, v_scale?= as value_scale, " QKV_PROGRAM_KEYWORDS
    ") "
    "-> output, softmax_lse as logsumexp",
    {.cpu = &paged_varlen_cpu,
     .meta = &meta,
     .no_gradient = "with block_table, call it under torch.no_grad() or detach() that"});

TORCH_LIBRARY_FRAGMENT(qkv, m) {
  using c10::DispatchKey;
  const Operator& kvcache = attention_with_kvcache;
  const auto implement = [&](DispatchKey key, boxed::BodyWithKeys body) {
    m.impl(kvcache.name.c_str(), torch::dispatch(key, boxed::kernel(kvcache, body)));
  };
  implement(DispatchKey::ADInplaceOrView, &count_writes);
  implement(DispatchKey::Negative, &resolve_negative);
}

}  // namespace ops

std::tuple<at::Tensor, at::Tensor> attention_with_kvcache(const at::Tensor& query,
                                                          const at::Tensor& k_cache,
                                                          const at::Tensor& v_cache,
                                                          const std::optional<at::Tensor>& key,
                                                          const std::optional<at::Tensor>& value,
                                                          const KvCacheOptions& o) {
  Call call = call_of(ops::attention_with_kvcache, query, k_cache, o);
  call.set(arg::value, v_cache);
  call.set(arg::new_key, tensor_of(key));
  call.set(arg::new_value, tensor_of(value));
  call.set(arg::value_scale, tensor_of(o.v_scale()));
  call.set(arg::cos, tensor_of(o.rotary_cos()));
  call.set(arg::sin, tensor_of(o.rotary_sin()));
  call.options.rotary_interleaved = o.rotary_interleaved();
  return pair_of(run(call));
}

}  // namespace qkv
