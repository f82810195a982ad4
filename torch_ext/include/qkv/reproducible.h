// The same bits on every CPU.
#pragma once

#include "qkv/export.h"

namespace qkv {

// While a ReproducibleGuard lives, calls of this process have the same bits on every CPU, and for
// any number of queries at once, as the environment variable QKV_REPRODUCIBLE=1 asks for;
// ReproducibleGuard(false) lets their last digits differ again. Its end restores what was set
// before. docs/determinism.md says what is promised; calls that cannot have it throw
// c10::NotImplementedError.
//
//   const qkv::ReproducibleGuard same_bits;
//   auto output = qkv::attention(query, key, value);
class QKV_API ReproducibleGuard {
 public:
  explicit ReproducibleGuard(bool yes = true);
  ~ReproducibleGuard();
  ReproducibleGuard(const ReproducibleGuard&) = delete;
  ReproducibleGuard& operator=(const ReproducibleGuard&) = delete;

 private:
  bool before_;
};

}  // namespace qkv
