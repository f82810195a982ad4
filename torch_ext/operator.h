// For calls through the dispatcher.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "call.h"

namespace qkv::ops {

// The operator `name`, whose parameters are those of `pack`.
template <class Result, auto pack>
struct Operator;

template <class Result, class Call, class... Args, Call (*pack)(Args...)>
struct Operator<Result, pack> {
  static const auto& find(const char* name) {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Result(Args...)>();
    return op;
  }
};

// window_size as an argument: None where it is open.
class Window {
 public:
  explicit Window(const Options& options) : sizes_(options.window_size) {
    if (sizes_[0].maybe_as_int() == -1 && sizes_[1].maybe_as_int() == -1) return;
    argument_ = c10::SymIntArrayRef(sizes_);
  }
  operator at::OptionalSymIntArrayRef() const { return argument_; }

 private:
  const std::array<c10::SymInt, 2>& sizes_;
  at::OptionalSymIntArrayRef argument_;
};

}  // namespace qkv::ops
