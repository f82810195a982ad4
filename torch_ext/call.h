// The arguments of an operator as one struct. A new option is added to schema.cpp, to
// AttentionOptions (qkv/attention.h), to Options here, and to ops.h and ops.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

namespace qkv {

using OptionalTensor = std::optional<at::Tensor>;
using OutputAndLse = std::tuple<at::Tensor, at::Tensor>;
using OutputAndIndex = std::tuple<at::Tensor, at::Tensor>;

// The tensors that an operator may take, in the order of the schemas.
enum Argument {
  kQuery,
  kKey,
  kValue,
  kAttnMask,
  kAlibiSlopes,
  kSinks,
  kDropoutSeed,
  kCuSeqQ,
  kCuSeqK,
  kSequsedK,
  kArguments
};
constexpr int kDifferentiable = kSinks + 1;
constexpr const char* kArgumentNames[kArguments] = {
    "query", "key",          "value",    "attn_mask", "alibi_slopes",
    "sinks", "dropout_seed", "cu_seq_q", "cu_seq_k",  "seqused_k"};

// The gradients of the first kDifferentiable arguments.
using Gradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using OutputMask = std::array<bool, kDifferentiable>;  // which of them are wanted

// The other arguments.
struct Options {
  double dropout_p = 0;
  bool is_causal = false;
  std::optional<double> scale = std::nullopt;
  bool enable_gqa = false;
  std::array<c10::SymInt, 2> window_size = {-1, -1};
  double softcap = 0;
};

// The arguments of one call, for its length.
struct Forward {
  const char* op;                                     // for error messages
  std::array<const at::Tensor*, kArguments> tensors;  // never null; undefined: None
  Options options;
  bool has_value = true;                      // attention_weights takes no value
  const char* const* names = kArgumentNames;  // what the operator calls them

  const at::Tensor& operator[](Argument argument) const { return *tensors[argument]; }
  const char* name_of(int argument) const { return names[argument]; }
  const at::Tensor& query() const { return *tensors[kQuery]; }
  const at::Tensor& key() const { return *tensors[kKey]; }
  const at::Tensor& value() const { return *tensors[kValue]; }
  const at::Tensor& attn_mask() const { return *tensors[kAttnMask]; }
  // Documents, one after the other: query [T, H, D], key [Tk, Hkv, D].
  bool is_packed() const { return tensors[kCuSeqQ]->defined(); }
};

// The arguments of attention_backward.
struct Backward {
  const at::Tensor& grad_output;  // undefined: zero
  const at::Tensor& grad_lse;     // likewise
  Forward forward;
  const at::Tensor& output;
  const at::Tensor& lse;
  OutputMask output_mask;
};

// What attention_weights returns: all of them, their mean over heads or their sum over queries.
enum class Reduce { none, heads, queries };

// The arguments of weights_forward.
struct Weights {
  Forward forward;  // has_value is false
  Reduce reduce;
};

// The arguments of weights_backward.
struct WeightsBackward {
  const at::Tensor& grad_weights;
  Weights weights;
  const at::Tensor& lse;
  OutputMask output_mask;
};

// The arguments of hard_forward.
struct Hard {
  Forward forward;
  bool straight_through;
};

// The arguments of hard_backward.
struct HardBackward {
  const at::Tensor& grad_output;
  Hard hard;
  const at::Tensor& index;
  OutputMask output_mask;
};

// Whether there is a gradient to compute: not of None or a boolean mask.
inline bool has_gradient(const Forward& call, const OutputMask& wanted, Argument argument) {
  return wanted[argument] && call[argument].defined() &&
         at::isFloatingType(call[argument].scalar_type());
}

// Of the gradients that are asked for, those that there are: only the value's, unless
// straight_through.
inline OutputMask wanted_of(const HardBackward& call) {
  OutputMask wanted{};
  for (int i = 0; i < kDifferentiable; ++i)
    wanted[i] = call.output_mask[i] && (i == kValue || call.hard.straight_through);
  return wanted;
}

inline const at::Tensor kNone;

inline const at::Tensor& tensor_of(const OptionalTensor& tensor) {
  return tensor ? *tensor : kNone;
}
inline OptionalTensor optional(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

}  // namespace qkv
