#include <torch/csrc/autograd/VariableTypeUtils.h>

#include "autograd/run.h"
#include "call/autocast.h"
#include "call/boxed.h"
#include "call/from_options.h"
#include "ops/kvcache/rows.h"
#include "ops/rotate/rotate.h"
#include "qkv/kvcache.h"
#include "tensors/copies.h"
#include "tensors/documents.h"
#include "tensors/layout.h"
#include "tensors/problem.h"

namespace qkv {
namespace ops {
namespace {

// Elements from one row of the caches, or block, to the next in a scale.
int64_t place_stride(const at::Tensor& scale) {
  return is_per_token(scale) ? scale.strides()[0] : 0;
}

// The scales of int8 keys and values; `head` is the dimension of these that has the heads.
void bind_scales(const Call& call, int64_t head, Problem& p) {
  for (const auto& [input, which] :
       {std::pair(&p.key_scale, arg::key_scale), {&p.value_scale, arg::value_scale}}) {
    const at::Tensor& scale = call[which];
    if (!scale.defined()) continue;
    input->data = scale.const_data_ptr();
    input->strides.batch[0] = place_stride(scale);
    if (is_per_token(scale)) {
      input->strides.head = scale.strides()[head];
      input->strides.row = scale.strides()[3 - head];
    } else if (scale.numel() > 1) {
      input->strides.head = scale.strides()[0];
    }
  }
}

// The blocks of key and value, without a table; `size` is how many rows each has.
Pages blocks_of(const Call& call, int64_t size) {
  return {nullptr,
          size,
          call[arg::key].strides()[0],
          call[arg::value].strides()[0],
          place_stride(call[arg::key_scale]),
          place_stride(call[arg::value_scale])};
}

// `head` is the dimension of key and value that has the heads.
void attend_to_spans(const Call& call, const Sizes<int64_t>& sizes, int64_t head,
                     const std::vector<Span>& spans, const Tensors& results) {
  if (!is_aligned(call))
    return attend_to_spans(*CopiedCall(call, aligned), sizes, head, spans, results);
  KernelCall kernel(call, sizes);
  ForwardResult result;
  kernel.bind({&result.output, &result.lse}, results);
  kernel.set_strides();
  Problem& p = kernel.problem;
  bind_scales(call, head, p);
  if (call.has(arg::block_table)) p.pages = blocks_of(call, call[arg::key].sizes()[3 - head]);
  p.spans = spans.data();
  qkv::attention_forward(p, result);
}

// Rotates the query of `call` and what is appended to their places; `rotated` gets the two tensors,
// to which the call refers then. Throws c10::Error where cos and sin have no row for a place.
void rotate_to_places(Call& call, const CacheRows& rows, std::array<at::Tensor, 2>& rotated) {
  const at::Tensor &query = call[arg::query], &cos = call[arg::cos];
  const Window& window = call.options.window_size;
  const bool moves = call.options.causal || window.left >= 0 || window.right >= 0;
  const int64_t last =
      std::max(rows.new_rows, moves ? query.size(2) : std::min<int64_t>(query.size(2), 1));
  std::vector<int64_t> places, of_heads;  // of_heads: each place for all heads of its query
  for (int64_t b = 0; b < query.size(0); ++b) {
    places.push_back(rows.length(b));
    if (!moves) of_heads.insert(of_heads.end(), query.size(1), places.back());
    TORCH_CHECK(places.back() + last <= cos.size(0), call.title(), ": rotary_cos has ", cos.size(0),
                " rows, but ", places.back() + last, " are expected: batch item ", b, " has ",
                places.back(), " keys before ", last, " more places are rotated to");
  }
  const auto turned = [&](const at::Tensor& x, c10::ArrayRef<int64_t> begins) {
    return rotated_from(x, cos, call[arg::sin], call.options.rotary_interleaved.value_or(true),
                        begins);
  };
  // Queries at one place are heads of one query.
  rotated = {moves ? turned(query, places) : turned(query.unsqueeze(3), of_heads).squeeze(3),
             turned(call[arg::new_key], places)};
  call.set(arg::query, rotated[0]), call.set(arg::new_key, rotated[1]);
}

Tensors kvcache_cpu(const Call& call) {
  const auto sizes = check_kvcache<int64_t>(call);
  const CacheRows rows = cache_rows(call, sizes);
  Tensors results = empty_results(call, sizes);
  std::optional<Call> rotated;
  std::array<at::Tensor, 2> tensors;
  if (call.has(arg::cos)) rotate_to_places(rotated.emplace(call), rows, tensors);
  const Call& turned = rotated ? *rotated : call;
  if (appends(turned)) append(turned, rows, num_threads());
  if (results[1].numel() > 0) attend_to_spans(turned, sizes, 1, rows.spans, results);
  return results;
}

Tensors paged_varlen_cpu(const Call& call) {
  const auto sizes = check_kvcache<int64_t>(call);
  Documents documents = documents_of(call, sizes);
  const auto pages = set_pages(call, call[arg::key].sizes()[1], documents.all);
  Tensors results = empty_results(call, sizes);
  fill_gaps(documents, sizes.seqlen_q, results);
  if (!documents.all.empty()) attend_to_spans(call, sizes, 2, documents.all, results);
  return results;
}

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
