// The low-level operators of schema.cpp as C++ functions. The dispatcher passes every argument by
// itself; everything else here sees one struct.
#pragma once

#include <c10/core/DispatchKeySet.h>

#include "after_fork.h"
#include "call.h"

namespace qkv::ops {

// Without wants_lse, logsumexp may be undefined.
at::Tensor dropout_seed(const at::Tensor& query);
OutputAndLse attention_forward(const Forward& call, bool wants_lse = true);
Gradients attention_backward(const Backward& call);
OutputAndLse weights_forward(const Weights& call);
Gradients weights_backward(const WeightsBackward& call);
OutputAndIndex hard_forward(const Hard& call);
Gradients hard_backward(const HardBackward& call);

// The same, with the kernel that comes next in `keys`.
OutputAndLse attention_forward(c10::DispatchKeySet keys, const Forward& call);
Gradients attention_backward(c10::DispatchKeySet keys, const Backward& call);
OutputAndLse weights_forward(c10::DispatchKeySet keys, const Weights& call);
Gradients weights_backward(c10::DispatchKeySet keys, const WeightsBackward& call);
OutputAndIndex hard_forward(c10::DispatchKeySet keys, const Hard& call);
Gradients hard_backward(c10::DispatchKeySet keys, const HardBackward& call);

// Arguments as the schemas have them. window_size: None is open on both sides.
std::array<c10::SymInt, 2> window_of(at::OptionalSymIntArrayRef window_size);
Reduce reduce_of(std::optional<std::string_view> reduce);  // None, "heads" or "queries"

// All arguments as the dispatcher passes them; the parameters are the operator's signature.
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

Weights weights_args(const at::Tensor& query, const at::Tensor& key,
                     const OptionalTensor& attn_mask, const OptionalTensor& alibi_slopes,
                     const OptionalTensor& sinks, const OptionalTensor& dropout_seed,
                     double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa,
                     at::OptionalSymIntArrayRef window_size, double softcap,
                     std::optional<std::string_view> reduce);

WeightsBackward weights_backward_args(const at::Tensor& grad_weights, const at::Tensor& query,
                                      const at::Tensor& key, const OptionalTensor& attn_mask,
                                      const OptionalTensor& alibi_slopes,
                                      const OptionalTensor& sinks,
                                      const OptionalTensor& dropout_seed, const at::Tensor& lse,
                                      double dropout_p, bool is_causal, std::optional<double> scale,
                                      bool enable_gqa, at::OptionalSymIntArrayRef window_size,
                                      double softcap, std::optional<std::string_view> reduce,
                                      OutputMask output_mask);

Hard hard_args(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               const OptionalTensor& attn_mask, const OptionalTensor& alibi_slopes, bool is_causal,
               std::optional<double> scale, bool enable_gqa, at::OptionalSymIntArrayRef window_size,
               double softcap, bool straight_through);

HardBackward hard_backward_args(const at::Tensor& grad_output, const at::Tensor& query,
                                const at::Tensor& key, const at::Tensor& value,
                                const OptionalTensor& attn_mask, const OptionalTensor& alibi_slopes,
                                const at::Tensor& index, bool is_causal,
                                std::optional<double> scale, bool enable_gqa,
                                at::OptionalSymIntArrayRef window_size, double softcap,
                                bool straight_through, OutputMask output_mask);

// Adapter<&forward_args, &kernel>::call is kernel(Forward) with the dispatcher's signature, in
// which torch's operators do not hang after fork(); with_keys is kernel(keys, Forward), for kernels
// that redispatch.
template <auto pack, auto kernel>
struct Adapter;

template <class Call, class... Args, Call (*pack)(Args...), auto kernel>
struct Adapter<pack, kernel> {
  static auto call(Args... args) {
    const OneThreadAfterFork one_thread;
    return kernel(pack(args...));
  }
  static auto with_keys(c10::DispatchKeySet keys, Args... args) {
    return kernel(keys, pack(args...));
  }
};

}  // namespace qkv::ops
