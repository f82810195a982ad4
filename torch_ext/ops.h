// The low-level operators of schema.cpp as C++ functions. The dispatcher passes
// every argument by itself; everything else here sees one struct. A new option is
// added to schema.cpp, to AttentionOptions, and to Options and the functions below.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/SymInt.h>

#include <array>
#include <optional>
#include <tuple>

#include "qkv/attention.h"

namespace qkv {

using OptionalTensor = std::optional<at::Tensor>;
using OutputAndLse = std::tuple<at::Tensor, at::Tensor>;

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
  bool has_value = true;  // attention_weights takes no value

  const at::Tensor& operator[](Argument argument) const { return *tensors[argument]; }
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

inline const at::Tensor kNone;

inline const at::Tensor& tensor_of(const OptionalTensor& tensor) {
  return tensor ? *tensor : kNone;
}
inline OptionalTensor optional(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

namespace ops {

at::Tensor dropout_seed(const at::Tensor& query);
OutputAndLse attention_forward(const Forward& call);
Gradients attention_backward(const Backward& call);

// The same, with the kernel that comes next in `keys`.
OutputAndLse attention_forward(c10::DispatchKeySet keys, const Forward& call);
Gradients attention_backward(c10::DispatchKeySet keys, const Backward& call);

// window_size as the schemas have it; None is open on both sides.
std::array<c10::SymInt, 2> window_of(at::OptionalSymIntArrayRef window_size);

// The arguments as the dispatcher passes them, packed; the parameters are the operator's signature.
Forward forward_args(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const OptionalTensor& attn_mask, const OptionalTensor& alibi_slopes,
                     const OptionalTensor& sinks, const OptionalTensor& dropout_seed,
                     const OptionalTensor& cu_seq_q, const OptionalTensor& cu_seq_k,
                     const OptionalTensor& seqused_k, double dropout_p, bool is_causal,
                     std::optional<double> scale, bool enable_gqa,
                     at::OptionalSymIntArrayRef window_size, double softcap);

Backward backward_args(const OptionalTensor& grad_output, const OptionalTensor& grad_lse,
                       const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                       const OptionalTensor& attn_mask, const OptionalTensor& alibi_slopes,
                       const OptionalTensor& sinks, const OptionalTensor& dropout_seed,
                       const OptionalTensor& cu_seq_q, const OptionalTensor& cu_seq_k,
                       const OptionalTensor& seqused_k, const at::Tensor& output,
                       const at::Tensor& lse, double dropout_p, bool is_causal,
                       std::optional<double> scale, bool enable_gqa,
                       at::OptionalSymIntArrayRef window_size, double softcap,
                       OutputMask output_mask);

// Adapter<&forward_args, &kernel>::call is kernel(Forward) with the dispatcher's signature;
// with_keys is kernel(keys, Forward), for kernels that redispatch.
template <auto pack, auto kernel>
struct Adapter;

template <class Call, class... Args, Call (*pack)(Args...), auto kernel>
struct Adapter<pack, kernel> {
  static auto call(Args... args) { return kernel(pack(args...)); }
  static auto with_keys(c10::DispatchKeySet keys, Args... args) {
    return kernel(keys, pack(args...));
  }
};

}  // namespace ops
}  // namespace qkv
