// Every argument of every operator, described once: the tensors here, what is no tensor in
// options.h. An operator names the ones that it takes (operator.h); its schema, how it is packed
// into a Call, what is checked, what its Meta kernel allocates, how the kernels get it, what a Node
// saves, what compiled autograd collects and what its backward operator returns follow from these
// two tables. A new option is a row in one of them, and its name in the signatures of the operators
// that take it.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace qkv {

// What the sizes of a tensor are to be: Sizes (check.h) knows them, the kernels' strides follow.
enum class Shape : int8_t {
  tensor,    // [..., H, rows, columns]; packed: [rows, H, columns]
  output,    // [..., H, L, Dv]; packed: [T, H, Dv]
  row,       // [..., H, L], a number for each row of the scores; packed: [H, T]
  weights,   // [..., H, L, S], or reduced: what attention_weights returns
  mask,      // broadcastable to [..., H, L, S]
  spans,     // broadcastable to [..., H, L, 2 n], for any n of at least 1
  per_head,  // broadcastable to [..., H] or, packed, [N, H]
  tables,    // [N] or [R, N], of a score program: call/scores.h
  own        // the operators that take it say
};

// What the dtype of a tensor is to be.
enum class Type : int8_t {
  query,     // that of query
  compute,   // what is computed with: float64 for float64, else float32
  mask,      // bool, float32 or that of query
  addend,    // float32 or that of query
  floating,  // any floating dtype
  float32,
  int32,
  int64,
  index,    // int32 or int64
  tangent,  // that of the tensor whose tangent it is
  own       // the operators that take it say
};

// X(name, shape, type): the tensors. The first ones have gradients where they are floating: those
// of attention, and those that a rotation has beside query and key.
#define QKV_ATTENTION_TENSORS(X)                                     \
  X(query, tensor, query) /* [..., H, L, D]; packed: [T, H, D] */    \
  X(key, tensor, query)   /* [..., H, S, D]; packed: [Tk, H, D] */   \
  X(value, tensor, query) /* [..., H, S, Dv]; packed: [Tk, H, Dv] */ \
  X(attn_mask, mask, mask)                                           \
  X(bias, mask, addend)                                              \
  X(alibi_slopes, per_head, floating)                                \
  X(sinks, per_head, floating)                                       \
  X(score_tables, tables, compute) /* what score_program reads */
#define QKV_ROTATION_TENSORS(X)                    \
  X(cos, own, addend)        /* [..., L, R / 2] */ \
  X(sin, own, addend)        /* [..., L, R / 2] */ \
  X(query_norm, own, addend) /* [..., D] */        \
  X(key_norm, own, addend)   /* [..., D] */
#define QKV_DIFFERENTIABLE_TENSORS(X) QKV_ATTENTION_TENSORS(X) QKV_ROTATION_TENSORS(X)

// The gradient of x is called grad_x, and x_tangent is the direction in which x changes, in forward
// mode: gradient_of and tangent_of go by these names. Besides these, there is a tangent of every
// differentiable tensor, of its shape and dtype.
#define QKV_OTHER_TENSORS(X)                                                                     \
  X(spans, spans, int32)          /* begins and ends of the keys that a query sees */            \
  X(dropout_seed, own, own)       /* int64 [1]; or [n], see Problem::dropout_seeds */            \
  X(cu_seq_q, own, index)         /* [N + 1]: where each of N packed documents begins */         \
  X(cu_seq_k, own, index)         /* likewise, of key and value */                               \
  X(seqused_k, own, index)        /* [N]: how many keys of each document take part */            \
  X(block_table, own, index)      /* [N, blocks of a document]: key and value in blocks */       \
  X(new_key, tensor, query)       /* [B, Hkv, L_new, D]: appended to a cache */                  \
  X(new_value, tensor, query)     /* [B, Hkv, L_new, Dv] */                                      \
  X(cache_seqlens, own, index)    /* [B] */                                                      \
  X(cache_batch_idx, own, index)  /* [B] */                                                      \
  X(cache_leftpad, own, index)    /* [B] */                                                      \
  X(key_scale, own, float32)      /* [1], [Hkv] or key's shape without D: of int8 key */         \
  X(value_scale, own, float32)    /* likewise */                                                 \
  X(score_indices, tables, int32) /* what score_program reads */                                 \
  X(output, output, query)        /* what a forward operator returned, as the next three */      \
  X(logsumexp, row, compute)                                                                     \
  X(weights, weights, query)                                                                     \
  X(index, row, int64)                                                                           \
  X(query_rope, own, query)   /* [..., H, L, R]: of latent attention, as the next three */       \
  X(rope_keys, own, query)    /* [..., 1, S, R] */                                               \
  X(key_weight, own, query)   /* [H, N, C] */                                                    \
  X(value_weight, own, query) /* [H, Dv, C] */                                                   \
  X(indices, own, index)      /* [..., L, k] or [..., Hkv, L, k]: keys that are chosen */        \
  X(rotated_query, own, query)                                                                   \
  X(rotated_key, own, query)                                                                     \
  X(output_tangent, output, query)                                                               \
  X(logsumexp_tangent, row, compute)                                                             \
  X(grad_output, output, query)                                                                  \
  X(grad_logsumexp, row, compute)                                                                \
  X(grad_rotated_query, own, query)                                                              \
  X(grad_rotated_key, own, query)                                                                \
  X(grad_weights, weights, query)                                                                \
  X(grad_output_tangent, output, query) /* of grad_output, and the gradient of output_tangent */ \
  X(grad_logsumexp_tangent, row, compute)

namespace arg {
#define QKV_ENUMERATOR(name, shape, type) name,
#define QKV_TANGENT(name, shape, type) name##_tangent,
enum Argument : int8_t {
  QKV_DIFFERENTIABLE_TENSORS(QKV_ENUMERATOR) QKV_OTHER_TENSORS(QKV_ENUMERATOR)
      QKV_DIFFERENTIABLE_TENSORS(QKV_TANGENT) count
};
#undef QKV_TANGENT
#undef QKV_ENUMERATOR
#define QKV_ONE(name, shape, type) +1
constexpr int kDifferentiable = QKV_DIFFERENTIABLE_TENSORS(QKV_ONE);
constexpr int kOfAttention = QKV_ATTENTION_TENSORS(QKV_ONE);  // of these, the first ones
#undef QKV_ONE
// From here on: what backward operators and jvp operators are given beside the forward operator's
// own arguments.
constexpr int kFirstGradient = grad_output;
}  // namespace arg
using arg::Argument;

struct ArgumentDescription {
  std::string_view name;
  Shape shape;
  Type type;
};

inline constexpr ArgumentDescription kArguments[] = {
#define QKV_ROW(name, shape, type) {#name, Shape::shape, Type::type},
#define QKV_TANGENT(name, shape, type) {#name "_tangent", Shape::shape, Type::tangent},
    QKV_DIFFERENTIABLE_TENSORS(QKV_ROW) QKV_OTHER_TENSORS(QKV_ROW)
        QKV_DIFFERENTIABLE_TENSORS(QKV_TANGENT)
#undef QKV_TANGENT
#undef QKV_ROW
};

// The argument whose name is these three, one after the other; `count`: there is none.
constexpr Argument argument_named(std::string_view prefix, std::string_view name,
                                  std::string_view suffix) {
  for (int i = 0; i < arg::count; ++i) {
    const std::string_view found = kArguments[i].name;
    if (found.size() == prefix.size() + name.size() + suffix.size() &&
        found.substr(0, prefix.size()) == prefix &&
        found.substr(prefix.size(), name.size()) == name &&
        found.substr(prefix.size() + name.size()) == suffix)
      return Argument(i);
  }
  return arg::count;
}

// Of each argument, another one whose name is its own between these two.
constexpr std::array<Argument, arg::count> arguments_named(std::string_view prefix,
                                                           std::string_view suffix) {
  std::array<Argument, arg::count> all{};
  for (int i = 0; i < arg::count; ++i) all[i] = argument_named(prefix, kArguments[i].name, suffix);
  return all;
}
inline constexpr auto kTangents = arguments_named("", "_tangent");
inline constexpr auto kGradients = arguments_named("grad_", "");

// The direction in which an argument changes, in forward mode, and the gradient of a result, as
// operators take them; and the differentiable tensor that has this direction. `count`: there is
// none.
constexpr Argument tangent_of(Argument argument) { return kTangents[argument]; }
constexpr Argument gradient_of(Argument argument) { return kGradients[argument]; }
constexpr Argument primal_of(Argument tangent) {
  return tangent >= tangent_of(arg::query) ? Argument(tangent - tangent_of(arg::query))
                                           : arg::count;
}
static_assert(tangent_of(arg::sinks) == arg::sinks_tangent);
static_assert(primal_of(arg::sinks_tangent) == arg::sinks);
static_assert(gradient_of(arg::output_tangent) == arg::grad_output_tangent);

// Whether an argument has a row for every query, and hides pairs of queries and keys or adds to
// their scores.
constexpr bool is_mask(Argument argument) {
  const Shape shape = kArguments[argument].shape;
  return shape == Shape::mask || shape == Shape::spans;
}

// Whether an argument is what forward operators return, or a gradient or a tangent of that.
constexpr bool is_result(Argument argument) {
  const Shape shape = kArguments[argument].shape;
  return shape == Shape::output || shape == Shape::row || shape == Shape::weights;
}

// Whether an argument is differentiable where it is floating: those of the forward operator, and
// what other operators are given beside them.
constexpr bool may_have_gradient(int argument) {
  return argument < arg::kDifferentiable || argument >= arg::kFirstGradient;
}

}  // namespace qkv
