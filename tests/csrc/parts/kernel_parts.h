// What the kernels of an instruction set are made of: functions of csrc/kernels, which a file of
// this folder compiles once more for each, so that tests hold them alone against plain loops.
// Operands and results are in the compute type.
#pragma once

#include "common/half.h"

namespace qkv {

struct KernelParts {
  int max_rows[2];  // the most rows of a micro-kernel that is one vector wide, and of one of two
  int column_step;  // `columns` is a multiple of this
  // C[rows x columns] = beta * C + A[rows x depth] * B[depth x columns]. `beta` is 0 or 1, or 2 for
  // lanes_beta [columns], which row after row of C is multiplied by. C has whole vectors, and what
  // is left of the last one becomes 0.
  void (*gemm)(int64_t rows, int64_t columns, int64_t depth, const void* a, int64_t a_row,
               int64_t a_col, const void* b, int64_t b_row, void* c, int64_t c_row, int beta,
               const void* lanes_beta);
  // out [count] = f(in [count]); `count` is a multiple of `lanes`.
  void (*exp2)(const void* in, void* out, int64_t count);
  void (*exp)(const void* in, void* out, int64_t count);
  void (*tanh)(const void* in, void* out, int64_t count);
  void (*sin)(const void* in, void* out, int64_t count);
  void (*cos)(const void* in, void* out, int64_t count);
  // out [columns x rows] = the transposed in [rows x columns]; both are multiples of `lanes`.
  void (*transpose)(const void* in, int64_t in_row, void* out, int64_t out_row, int64_t rows,
                    int64_t columns);
  // Functions of kernels/gemm/pairs.h, for bf16 where pairs are multiplied; else null.
  struct {
    bool tiles;  // whether gemm multiplies AMX's tiles, and so takes only an A whose a_col is 1
    // C = beta * C + alpha * A * B, where A and B hold pairs; `depth` counts pairs.
    void (*gemm)(int64_t rows, int64_t columns, int64_t depth, const Pair* a, int64_t a_row,
                 int64_t a_col, const Pair* b, int64_t b_row, float* c, int64_t c_row, int beta,
                 const float* lanes_beta, float alpha);
    void (*pair_rows)(const float* in, int64_t in_row, int64_t rows, int64_t lanes, Pair* out);
    // softmax_pairs (kernels/score/pair_softmax.h), for tiles of one or two vectors of lanes.
    void (*softmax)(int64_t lanes, int64_t keys, float* scores, float* max_state, float* sum_state,
                    float* rounded_sum, float* rescale, Pair* pairs);
    void (*narrow_rows)(const float* in, int64_t in_row, int64_t rows, int64_t columns,
                        BFloat16* out, int64_t out_row);
  } pairs = {};
};

// Those of one instruction set, by the compute type; `pairs`: where it multiplies pairs of bf16.
// Null: the instruction set whose kernels it takes has them (Implementation::others).
struct IsaParts {
  const char* isa;
  const KernelParts *f32, *f64, *pairs;
};

// Makes them known. Each file of this folder does so before main() begins.
bool add_parts(const IsaParts& parts);

// Those of the instruction set in use, for f32, f64 or, where there are pairs, bf16.
const KernelParts& active_parts(DType dtype);

}  // namespace qkv
