// What differs between the versions of torch that this builds with (TORCH_VERSIONS in
// qkv/version.py), and nothing else.
#pragma once

#include <c10/util/Exception.h>

#include <stdexcept>

namespace qkv {

// Python's ValueError for what the kernels, which know no torch, refuse as std::invalid_argument:
// by itself that is a ValueError in torch 2.13 and a RuntimeError in 2.15.
template <class Call>
auto with_value_error(const Call& call) {
  try {
    return call();
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

}  // namespace qkv
