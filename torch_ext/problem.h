// From tensors to the kernel library's Problem.
#pragma once

#include "attention.h"
#include "check.h"

namespace qkv {

// Which dimensions a tensor has after those of the batch.
enum class Dims {
  head_row_column,  // packed: [row, head, column]
  head_row,
  head,  // packed: [document, head]; the document's stride is called row
};

// A Problem, and the tensors that it and its results point into. `call` and `sizes` must outlive
// this. Everything is bound before set_strides().
class KernelCall {
 public:
  // Binds the arguments of `call`.
  KernelCall(const Forward& call, const Sizes<int64_t>& sizes);

  Problem problem;

  void bind(Input& input, const at::Tensor& tensor, Dims dims);
  void bind(Output& output, const at::Tensor& tensor, Dims dims);

  // Sets problem.batch_* and all strides. Adjacent batch dimensions that all tensors step through
  // evenly become one; throws c10::Error if more than kMaxBatchRank are left.
  void set_strides();

 private:
  struct Operand {
    const at::Tensor* tensor;
    Strides* strides;
    int64_t batch;  // how many dimensions come after those of the batch
  };
  void add(const at::Tensor& tensor, Strides& strides, Dims dims);
  void bind_mask();
  void bind_per_head(Argument argument, at::Tensor& copy, Input& input);

  const Forward& call_;
  const Sizes<int64_t>& sizes_;
  at::Tensor alibi_slopes_, sinks_;  // as the kernels take them: double
  c10::SmallVector<Operand, 20> operands_;
};

// Without any, there is nothing for the kernels to do.
inline bool has_queries(const Problem& p) { return p.batch() > 0 && p.heads > 0 && p.seqlen_q > 0; }

}  // namespace qkv
