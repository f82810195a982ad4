// The arguments of operators that are no tensors: arguments.h.
#pragma once

#include <c10/core/SymInt.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "problem.h"

namespace qkv {

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

// X(name, type): what is no tensor. Each has its type's zero, or what stands for None, as default.
#define QKV_OPTIONS(X)                                                \
  X(dropout_p, double)                                                \
  X(is_causal, bool)                                                  \
  X(scale, std::optional<double>)                                     \
  X(enable_gqa, bool)                                                 \
  X(window_size, Window)                                              \
  X(softcap, double)                                                  \
  X(causal, bool) /* as is_causal, but aligned bottom-right */        \
  X(shard, ShardNumbers)                                              \
  X(scores, ScoreWay) /* of the forward pass that made lse */         \
  X(reduce, Reduce)                                                   \
  X(straight_through, bool)                                           \
  X(max_q, c10::SymInt)                                               \
  X(max_k, c10::SymInt)                                               \
  X(score_program, std::string)  /* "": there is none */              \
  X(absorb, std::optional<bool>) /* of latent attention */            \
  X(eps, double)                 /* of a rotation, as the next one */ \
  X(interleaved, bool)                                                \
  X(rotary_interleaved, std::optional<bool>) /* of a cache; None: as FlashAttention, true */

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
#define QKV_SCORE_KEYWORDS "softcap=, alibi_slopes?=, bias?=, spans?="
#define QKV_SCORE_TENSORS "attn_mask?, bias?, spans?, alibi_slopes?"
#define QKV_SCORE_OPTIONS "scale, enable_gqa, window_size, softcap, " QKV_PROGRAM_KEYWORDS
// The last keywords of users' operators.
#define QKV_PROGRAM_KEYWORDS "score_program=, score_tables?=, score_indices?="

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
