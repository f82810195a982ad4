// The same bits on every CPU.
#pragma once

#include "qkv/export.h"

namespace qkv {

// While one of these lives, calls of this process have the same bits on every CPU, and for any
// number of queries at once, or may differ in their last digits again; then it is as it was before.
// It is what the environment variable QKV_REPRODUCIBLE=1 asks for. docs/determinism.md says what is
// promised; calls that cannot have it throw c10::NotImplementedError.
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
