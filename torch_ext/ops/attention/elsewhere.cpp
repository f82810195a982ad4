#include <ATen/ops/scaled_dot_product_attention.h>

#include "call/check.h"
#include "ops/attention/attention.h"

namespace qkv::ops {

bool is_elsewhere(const Call& call) {
  const at::Device device = call[arg::query].device();
  return !device.is_cpu() && !device.is_meta();
}

Tensors attend_elsewhere(const Call& call) {
  check_tensors(call);
  const Options& o = call.options;
  const auto refuse = [&](bool wanted, std::string_view what) {
    TORCH_CHECK_NOT_IMPLEMENTED(!wanted, "attention: query is on ", call[arg::query].device(),
                                ", where torch's attention computes the result, and that cannot ",
                                what);
  };
  refuse(call.op->results.size() > 1, "return the log-sum-exp");
  refuse(call.has(arg::attn_mask) && call.has(arg::bias), "add bias to attn_mask; pass one mask");
  const at::Tensor& mask = call[call.has(arg::bias) ? arg::bias : arg::attn_mask];
  refuse(mask.defined() && o.is_causal, "combine attn_mask with is_causal; pass one mask");
  refuse(!(o.window_size.left == -1 && o.window_size.right == -1),
         "do window_size; pass an attn_mask");
  refuse(call.has(arg::spans), "do spans; pass an attn_mask");
  refuse(o.softcap != 0, "do softcap");
  for (const Argument of_heads : kHeadArguments)
    refuse(call.has(of_heads),
           c10::str("do ", kArguments[of_heads].name,
                    of_heads == arg::alibi_slopes ? "; pass an attn_mask" : ""));
  return {at::scaled_dot_product_attention(call[arg::query], call[arg::key], call[arg::value],
                                           optional(mask), o.dropout_p, o.is_causal, o.scale,
                                           o.enable_gqa)};
}

}  // namespace qkv::ops
