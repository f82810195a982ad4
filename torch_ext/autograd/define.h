// Operators that torch knows.
#pragma once

#include <torch/library.h>

#include "call/operator.h"

namespace qkv {

// Of tensors that no kernel takes: operators refuse them in words of their own.
constexpr c10::DispatchKey kRefusedKeys[] = {
    c10::DispatchKey::CompositeExplicitAutograd, c10::DispatchKey::NestedTensorCPU,
    c10::DispatchKey::NestedTensorCUDA, c10::DispatchKey::NestedTensorMeta};

// Constructing one registers its schema and, for every dispatch key, its kernels: its own, or what
// follows from its signature. It lives as long as the process.
class DefinedOperator : public Operator {
 public:
  template <class Source>  // a title, or the operator whose gradients it computes
  DefinedOperator(Source&& source, const std::string& signature, const OperatorKernels& kernels)
      : Operator(std::forward<Source>(source), signature, kernels) {
    define();
  }

 private:
  void define();

  torch::Library library_{torch::Library::FRAGMENT, "qkv", std::nullopt, __FILE__, __LINE__};
};

}  // namespace qkv
