// From tensors to the kernel library's Problem.
#pragma once

#include "attention_jvp.h"
#include "call/scores.h"

namespace qkv {

// A Problem, and the tensors that it and its results point into. `call` and `sizes` must outlive
// this. Everything is bound before set_strides().
class KernelCall {
 public:
  // Binds the arguments of `call`.
  KernelCall(const Call& call, const Sizes<int64_t>& sizes);

  Problem problem;

  // Each with the dimensions that Shape gives it after those of the batch.
  void bind(Input& input, const at::Tensor& tensor, Shape shape);
  void bind(Output& output, const at::Tensor& tensor, Shape shape);
  // An argument of the call, unless it is None.
  void bind(Input& input, Argument argument);
  // What the call's operator returns, in its order; undefined: not wanted.
  void bind(std::initializer_list<Output*> outputs, const Tensors& results);
  // The tangents of the call's arguments, of which each may be None.
  void bind_tangents(JvpArgs& args);

  // Sets problem.batch_* and all strides. The batch of packed documents, or of a cache, has an item
  // for each, whose rows are then to be given (Problem::spans). Of others, adjacent batch
  // dimensions that all tensors step through evenly become one; throws c10::Error if more than
  // kMaxBatchRank are left.
  void set_strides();

 private:
  struct Operand {
    const at::Tensor* tensor;
    Strides* strides;
    int64_t batch;  // how many dimensions come after those of the batch
  };
  void add(const at::Tensor& tensor, Strides& strides, Shape shape);
  // Query, key, value, masks, slopes and sinks, or what `which` says of them. Inputs: Problem or
  // JvpArgs.
  template <class Inputs, class Which>
  void bind_differentiable(Inputs& to, const Which& which);
  void bind_seeds();
  void bind_score_program();

  const Call& call_;
  const Sizes<int64_t>& sizes_;
  // The numbers of heads and their tangents, as the kernels take them: double. They stay where they
  // are, since operands_ has their addresses.
  std::array<at::Tensor, 2 * kHeadArguments.size()> per_head_;
  size_t per_heads_ = 0;
  at::Tensor seeds_;
  // Null: there is no score program.
  struct Function {
    ScoreFunction function;
    std::shared_ptr<const ScoreProgram> program;
    at::Tensor tables, tangent, indices;  // contiguous
  };
  std::unique_ptr<Function> function_;
  c10::SmallVector<Operand, 28> operands_;
};

// As torch is set; 1 inside a parallel region of the caller's.
int num_threads();

// Without any, there is nothing for the kernels to do.
inline bool has_queries(const Problem& p) { return p.batch() > 0 && p.heads > 0 && p.seqlen_q > 0; }

}  // namespace qkv
