// The types of a mask's elements.
#pragma once

#include "common/half.h"
#include "problem.h"

namespace qkv {

// Of a floating mask: both types are in one order.
constexpr MaskType mask_type(DType dtype) { return MaskType(int(MaskType::f32) + int(dtype)); }
static_assert(mask_type(DType::f64) == MaskType::f64 && mask_type(DType::f16) == MaskType::f16);

// Calls f(M{}) for the type M of a mask's elements, which are bytes of a boolean one; not at all if
// there is no mask.
template <class F>
void with_elements(MaskType type, const F& f) {
  if (type == MaskType::boolean)
    f(uint8_t{});
  else if (type != MaskType::none)
    with_type(DType(int(type) - int(MaskType::f32)), f);
}

}  // namespace qkv
