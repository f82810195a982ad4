// For calls through the dispatcher.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "call.h"

namespace qkv::ops {

// Looks the operator `name` up, whose parameters are those of `pack`. Nothing is kept here: a
// caller that keeps the handle does so in a `static` beside the name, so that two operators with
// the same parameters never share one.
template <class Result, class Call, class... Args>
c10::TypedOperatorHandle<Result(Args...)> find_operator(const char* name, Call (*)(Args...)) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Result(Args...)>();
}

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
