// The C++ type of a mask's elements.
#pragma once

#include "common/half.h"
#include "problem.h"

namespace qkv {

static_assert(int(MaskType::f16) - int(MaskType::f32) == int(DType::f16));
// Calls f(M{}) for the type M of a mask's elements, which are bytes of a boolean one; not at all if
// there is no mask.
template <class F>
void with_elements(MaskType type, const F& f) {
  if (type == MaskType::boolean)
    f(uint8_t{});
  else if (type != MaskType::none)
    with_type(DType(int(type) - int(MaskType::f32)), f);  // they are in one order
}

}  // namespace qkv
