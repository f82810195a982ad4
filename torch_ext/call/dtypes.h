// The dtypes that are computed with, in torch's words and in those of csrc.
#pragma once

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <optional>

#include "common/tensor.h"

namespace qkv {

// Nothing for any other.
inline std::optional<DType> dtype_of(c10::ScalarType dtype) {
  // In the order of DType.
  constexpr std::array kDtypes = {c10::kFloat, c10::kDouble, c10::kBFloat16, c10::kHalf};
  const auto found = std::find(kDtypes.begin(), kDtypes.end(), dtype);
  if (found == kDtypes.end()) return {};
  return DType(found - kDtypes.begin());
}

}  // namespace qkv
