// Products of few rows with matrices, by which a step of decoding goes in and out of attention: a
// part of the public interface (attention.h).
//
//   output[b, m, n] = bias[n] + sum_k input[b, m, k] * matrix[b, n, k]
//
// Each number of a matrix is read once, from where it lies, for all rows, and multiplied as often
// as there are rows: of few rows the time is that of reading the matrices from memory.
#pragma once

#include <cstdint>

#include "common/tensor.h"
#include "export.h"

namespace qkv {

struct RowProduct {
  DType dtype = DType::f32;  // of all tensors
  int64_t batch = 1;         // B
  int64_t rows = 0;          // M, at most kMostProductRows
  int64_t depth = 0;         // K
  int64_t columns = 0;       // N
  // [B, M, K], [B, N, K], [N] (row and head unused) and [B, M, N]; the stride of the batch is
  // `head`. No data of bias: there is none.
  Input input, matrix, bias;
  Output output;
  int num_threads = 1;
};

constexpr int64_t kMostProductRows = 8;

// The stride of a matrix is 1 along K, and K a multiple of this, or both hold of N.
constexpr int64_t kProductUnit = 16;
// Whether the matrix lies along K; else it lies along N.
inline bool along_depth(const RowProduct& p) {
  return p.matrix.strides.col == 1 && p.depth % kProductUnit == 0;
}
// Whether row_product() multiplies these; where reproducible(), it multiplies none.
QKV_CORE_API bool multiplies_rows(const RowProduct& product);

// Everything is computed in compute_type() and rounded once. The results have the same bits
// whatever num_threads is. Throws std::bad_alloc if there is no memory for its workspace.
QKV_CORE_API void row_product(const RowProduct& product);

// Columns [begin, end) of one item of the batch: the most that an item has is kProductColumns.
struct RowProductItem {
  int64_t batch, begin, end;
};
constexpr int64_t kProductColumns = 2048;

}  // namespace qkv
