// qkv::dropout_seed, from which dropout's random numbers follow.
#pragma once

#include "call/call.h"

namespace qkv::ops {

// Draws the seed of a call that needs one. The call refers to it as long as this lives.
class Seed {
 public:
  explicit Seed(Call& call);

 private:
  at::Tensor seed_;
};

}  // namespace qkv::ops
