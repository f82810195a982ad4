// What a mask of a layer may be made of.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>

namespace qkv::nn {

// Whether a mask of this dtype goes with a projected query of that one: Bool, Float and the query's
// own do, and a reduced one where autocast casts it.
inline bool is_mask_type(at::ScalarType mask, at::ScalarType query) {
  const bool is_cast = at::isReducedFloatingType(mask) && query != at::kDouble &&
                       at::autocast::is_autocast_enabled(at::kCPU);
  return mask == at::kBool || mask == at::kFloat || mask == query || is_cast;
}

}  // namespace qkv::nn
