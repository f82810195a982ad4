// The dtypes that are computed with, in torch's words and in those of csrc.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "common/tensor.h"

namespace qkv {

// Nothing for any other.
inline std::optional<DType> dtype_of(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat:
      return DType::f32;
    case c10::kDouble:
      return DType::f64;
    case c10::kBFloat16:
      return DType::bf16;
    case c10::kHalf:
      return DType::f16;
    default:
      return {};
  }
}

}  // namespace qkv
