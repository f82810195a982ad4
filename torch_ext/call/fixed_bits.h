// What cannot have the same bits on every CPU, where a caller asks for that.
#pragma once

#include <c10/util/Exception.h>

#include "dispatch/dispatch.h"

namespace qkv {

// Throws NotImplementedError where reproducible(). `title`: of the call; `what` is a part of it.
template <class Title>
void refuse_where_reproducible(const Title& title, const char* what) {
  TORCH_CHECK_NOT_IMPLEMENTED(!reproducible(), title, ": ", what,
                              " has other bits on other CPUs, but the same are asked for; expected "
                              "qkv.set_reproducible(False), or a call without it");
}

}  // namespace qkv
