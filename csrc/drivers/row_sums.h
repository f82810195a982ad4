// What the weights of rows add up to (common/row_sums.h), for the length of a backward pass.
#pragma once

#include <optional>

#include "attention.h"
#include "common/workspace.h"

namespace qkv {

class RowSums {
 public:
  // Computes them in parallel, if any row of the problem wants them.
  RowSums(const Problem& p, const BackwardArgs& args);

  // The arguments, with BackwardArgs::row_sums.
  const BackwardArgs& args() const { return args_; }

 private:
  BackwardArgs args_;
  std::optional<Buffer> memory_;
};

}  // namespace qkv
