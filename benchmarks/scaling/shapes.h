// The inputs and results of one call, as python -m qkv.bench spells its shape.
#pragma once

#include <string>
#include <vector>

#include "attention.h"

namespace qkv::scaling {

// "BxHq[/Hkv]xLxSxD[c]", float32; c for causal. Throws std::invalid_argument for anything else.
class Call {
 public:
  explicit Call(const std::string& shape);

  void forward(int threads) const;
  // Needs one forward() before it.
  void backward(int threads) const;

  // What the gradients of query, key and value take.
  int64_t gradient_bytes() const;

 private:
  Problem problem(int threads) const;

  int64_t batch_, heads_, kv_heads_, seqlen_q_, seqlen_k_, head_dim_;
  bool is_causal_;
  Strides of_query_, of_key_, of_lse_;
  // As the names say; mutable memory that calls write to.
  mutable std::vector<float> query_, key_, value_, output_, lse_, grad_output_, grad_query_,
      grad_key_, grad_value_;
};

// The grid of python -m qkv.bench but for its decoding steps, which memory limits.
struct Named {
  const char *name, *shape;
};
inline constexpr Named kGrid[] = {
    {"vit-s", "8x6x197x197x64"},        {"bert", "8x12x512x512x64"},
    {"gpt2", "4x12x1024x1024x64c"},     {"base", "1x8x1024x1024x64"},
    {"long", "1x8x4096x4096x64c"},      {"long1h", "1x1x4096x4096x64"},
    {"llama", "1x32/8x1024x1024x128c"}, {"sd-unet", "2x8x4096x4096x40"},
    {"tiny", "64x4x16x16x32"},          {"cross", "4x8x64x1500x64"},
    {"d256", "1x8x1024x1024x256c"},
};

}  // namespace qkv::scaling
