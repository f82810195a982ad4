// qkv::attention_with_kvcache, and what computes qkv::varlen_attention with a block_table: keys and
// values that lie in a cache. For inference.
#pragma once

#include "autograd/define.h"
#include "call/check.h"

namespace qkv::ops {

// Its key and value are k_cache and v_cache; what is appended to them are new_key and new_value.
extern DefinedOperator attention_with_kvcache;
extern DefinedOperator varlen_attention_paged;

inline bool is_paged(const Call& call) { return call.has(arg::block_table); }
inline bool appends(const Call& call) { return call.has(arg::new_key); }

// Whether key and value are int8, and so have scales.
inline bool is_int8(const Call& call) { return call[arg::key].scalar_type() == at::kChar; }
// Whether a scale, of those that fit, has a number for every row of every head: appending writes
// it.
inline bool is_per_token(const at::Tensor& scale) { return scale.defined() && scale.dim() == 3; }

// What a call writes to.
inline c10::SmallVector<Argument, 4> written_by(const Call& call) {
  if (!appends(call)) return {};
  c10::SmallVector<Argument, 4> written = {arg::key, arg::value};
  for (const Argument scale : {arg::key_scale, arg::value_scale})
    if (is_per_token(call[scale])) written.push_back(scale);
  return written;
}

// Of either operator: throws c10::Error for shapes, dtypes and options that do not fit. seqlen_k is
// the most keys that a sequence can have. The numbers in index tensors are not looked at.
template <class T>
Sizes<T> check_kvcache(const Call& call);

}  // namespace qkv::ops
