// Every argument of every operator, described once. An operator names the ones that it takes
// (operator.h); its schema, how it is packed into a Call, what a Node saves, what compiled autograd
// collects and what its backward operator returns follow from these two tables. A new option is a
// row here, and its name in the signatures of the operators that take it.
#pragma once

#include <c10/core/SymInt.h>

#include <array>
#include <cstdint>
#include <optional>

namespace qkv {

// X(name): the tensors. Those before output have gradients where they are floating.
#define QKV_DIFFERENTIABLE_TENSORS(X)                        \
  X(query)        /* [..., H, L, D]; packed: [T, H, D] */    \
  X(key)          /* [..., H, S, D]; packed: [Tk, H, D] */   \
  X(value)        /* [..., H, S, Dv]; packed: [Tk, H, Dv] */ \
  X(attn_mask)    /* broadcastable to [..., H, L, S] */      \
  X(bias)         /* likewise, and floating */               \
  X(alibi_slopes) /* broadcastable to [..., H] or [N, H] */  \
  X(sinks)        /* likewise */

#define QKV_OTHER_TENSORS(X)                                                                \
  X(dropout_seed)      /* int64 [1]; or [n], see Problem::dropout_seeds */                  \
  X(cu_seq_q)          /* [N + 1]: where each of N packed documents begins */               \
  X(cu_seq_k)          /* likewise, of key and value */                                     \
  X(seqused_k)         /* [N]: how many keys of each document take part */                  \
  X(block_table)       /* [N, blocks of a document]: key and value in blocks */             \
  X(new_key)           /* [B, Hkv, L_new, D]: appended to a cache */                        \
  X(new_value)         /* [B, Hkv, L_new, Dv] */                                            \
  X(cache_seqlens)     /* [B] */                                                            \
  X(cache_batch_idx)   /* [B] */                                                            \
  X(cache_leftpad)     /* [B] */                                                            \
  X(key_scale)         /* float32 [1], [Hkv] or key's shape without D: of int8 key */       \
  X(value_scale)       /* likewise */                                                       \
  X(output)            /* [..., H, L, Dv], what a forward operator returned */              \
  X(logsumexp)         /* [..., H, L] */                                                    \
  X(weights)           /* [..., H, L, S], or reduced */                                     \
  X(index)             /* int64 [..., H, L] */                                              \
  X(output_tangent)    /* of output's shape */                                              \
  X(logsumexp_tangent) /* of logsumexp's */                                                 \
  X(grad_output)       /* of output's shape */                                              \
  X(grad_logsumexp)    /* of logsumexp's */                                                 \
  X(grad_weights)      /* of weights' */                                                    \
  X(query_tangent)     /* each tangent has the shape and dtype of its tensor; tangent_of */ \
  X(key_tangent)                                                                            \
  X(value_tangent)                                                                          \
  X(attn_mask_tangent)                                                                      \
  X(bias_tangent)                                                                           \
  X(alibi_slopes_tangent)                                                                   \
  X(sinks_tangent)                                                                          \
  X(grad_output_tangent) /* of output's shape; also the gradient of output_tangent */       \
  X(grad_logsumexp_tangent)

namespace arg {
#define QKV_ENUMERATOR(name) name,
enum Argument : int8_t {
  QKV_DIFFERENTIABLE_TENSORS(QKV_ENUMERATOR) QKV_OTHER_TENSORS(QKV_ENUMERATOR) count
};
#undef QKV_ENUMERATOR
#define QKV_ONE(name) +1
constexpr int kDifferentiable = QKV_DIFFERENTIABLE_TENSORS(QKV_ONE);
#undef QKV_ONE
// From here on: what backward operators and jvp operators are given beside the forward operator's
// own arguments.
constexpr int kFirstGradient = grad_output;
}  // namespace arg
using arg::Argument;

// The direction in which a differentiable argument changes, in forward mode.
constexpr Argument tangent_of(Argument argument) { return Argument(arg::query_tangent + argument); }
static_assert(tangent_of(arg::sinks) == arg::sinks_tangent);

// Whether an argument is differentiable where it is floating: those of the forward operator, and
// what other operators are given beside them.
constexpr bool may_have_gradient(int argument) {
  return argument < arg::kDifferentiable || argument >= arg::kFirstGradient;
}

// Those that are added to the scores, or hide them: Problem::masks.
inline constexpr std::array<Argument, 2> kMaskArguments = {arg::attn_mask, arg::bias};

// How many keys a query sees to the left and to the right of its own position; -1: all. The schemas
// have None where both sides are open.
struct Window {
  c10::SymInt left = -1, right = -1;
};

// Where a call stands in a larger one, of which it computes a part: query_offset, key_offset,
// seqlen_q, seqlen_k, head_offset, heads and batch_offset. They are the members of csrc's Shard,
// and what is added to Problem::dropout_batch. The schemas have None where all are 0.
struct ShardNumbers {
  std::array<c10::SymInt, 7> all;

  bool is_whole() const {
    for (const c10::SymInt& number : all)
      if (number.maybe_as_int() != 0) return false;
    return true;
  }
};

// What attention_weights returns: all weights, their mean over heads or their sum over queries.
enum class Reduce { none, heads, queries };

// How the forward pass made the scores that lse belongs to, in the words of csrc's ScoreWay, so
// that whatever is computed from lse makes them in the same way. None: as these arguments and
// settings have it.
enum class Scores { automatic, elements, pairs, tiles };

// X(name, type): what is no tensor. Each has its type's zero, or what stands for None, as default.
#define QKV_OPTIONS(X)                                         \
  X(dropout_p, double)                                         \
  X(is_causal, bool)                                           \
  X(scale, std::optional<double>)                              \
  X(enable_gqa, bool)                                          \
  X(window_size, Window)                                       \
  X(softcap, double)                                           \
  X(causal, bool) /* as is_causal, but aligned bottom-right */ \
  X(shard, ShardNumbers)                                       \
  X(scores, Scores)                                            \
  X(reduce, Reduce)                                            \
  X(straight_through, bool)                                    \
  X(max_q, c10::SymInt)                                        \
  X(max_k, c10::SymInt)

struct Options {
#define QKV_MEMBER(name, type) type name{};
  QKV_OPTIONS(QKV_MEMBER)
#undef QKV_MEMBER
};

namespace opt {
#define QKV_ENUMERATOR(name, type) name,
enum Option : int8_t { QKV_OPTIONS(QKV_ENUMERATOR) count };
#undef QKV_ENUMERATOR
}  // namespace opt
using opt::Option;

// What acts on scores, in the signatures (operator.h) of all operators: keywords of the users'
// operators; tensors and options of those that they are made of.
#define QKV_SCORE_KEYWORDS "softcap=, alibi_slopes?=, bias?="
#define QKV_SCORE_TENSORS "attn_mask?, bias?, alibi_slopes?"
#define QKV_SCORE_OPTIONS "scale, enable_gqa, window_size, softcap"

// visit(member) with the member of `options` that `option` names.
template <class AnyOptions, class Visit>
auto visit_option(AnyOptions& options, Option option, const Visit& visit) {
  switch (option) {
#define QKV_CASE(name, type) \
  case opt::name:            \
    return visit(options.name);
    QKV_OPTIONS(QKV_CASE)
#undef QKV_CASE
    default:
      return visit(options.dropout_p);  // not reached
  }
}

}  // namespace qkv
