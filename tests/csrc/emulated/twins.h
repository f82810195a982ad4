// The emulated instruction sets that a program has been linked with: each of these files adds its
// own before main() begins.
#pragma once

#include <vector>

namespace qkv {

inline std::vector<const char*>& twins() {
  static std::vector<const char*> names;
  return names;
}

}  // namespace qkv
