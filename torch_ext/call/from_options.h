// Calls from C++: the arguments of the public functions.
#pragma once

#include "call/call.h"
#include "qkv/kvcache.h"
#include "qkv/options.h"

namespace qkv {

// Sets what AttentionOptions and KvCacheOptions have in common. Refers to the tensors.
template <class AnyOptions>
void set_scores(Call& call, const AnyOptions& options) {
  call.set(arg::bias, tensor_of(options.bias()));
  call.set(arg::spans, tensor_of(options.spans()));
  call.set(arg::alibi_slopes, tensor_of(options.alibi_slopes()));
  call.set(arg::sinks, tensor_of(options.sinks()));
  call.set(arg::score_tables, tensor_of(options.score_tables()));
  call.set(arg::score_indices, tensor_of(options.score_indices()));
  call.options.score_program = options.score_program();
  call.options.softcap = options.softcap();
  if (const auto& window = options.window_size())
    call.options.window_size = {(*window)[0], (*window)[1]};
}

// Refers to the tensors.
inline Call call_of(const Operator& op, const at::Tensor& query, const at::Tensor& key,
                    const at::Tensor& value, const AttentionOptions& options) {
  Call call(op);
  call.set(arg::query, query);
  call.set(arg::key, key);
  call.set(arg::value, value);
  call.set(arg::attn_mask, tensor_of(options.attn_mask()));
  set_scores(call, options);
  call.options.dropout_p = options.dropout_p();
  call.options.is_causal = options.is_causal();
  call.options.scale = options.scale();
  call.options.enable_gqa = options.enable_gqa();
  return call;
}

// Of attention to a cache, which holds the keys. Refers to the tensors.
inline Call call_of(const Operator& op, const at::Tensor& query, const at::Tensor& cache,
                    const KvCacheOptions& options) {
  Call call(op);
  call.set(arg::query, query);
  call.set(arg::key, cache);
  call.set(arg::cache_seqlens, tensor_of(options.cache_seqlens()));
  call.set(arg::cache_batch_idx, tensor_of(options.cache_batch_idx()));
  call.set(arg::cache_leftpad, tensor_of(options.cache_leftpad()));
  call.set(arg::block_table, tensor_of(options.block_table()));
  call.set(arg::key_scale, tensor_of(options.k_scale()));
  call.options.scale = options.softmax_scale();
  call.options.causal = options.causal();
  set_scores(call, options);
  return call;
}

}  // namespace qkv
