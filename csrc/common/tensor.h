// A tensor as the caller describes it: the address of its first element, and strides.
#pragma once

#include <array>
#include <cstdint>

namespace qkv {

// The most batch dimensions of a Problem. The caller may merge those whose strides permit it;
// torch's own kernels take 1.
constexpr int kMaxBatchRank = 8;

enum class DType : uint8_t { f32, f64, bf16, f16 };  // bf16 and f16: common/half.h

// The type in which scores, weights and all sums are computed: f64 for f64, f32 for all others.
constexpr DType compute_type(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }
// The bytes of an element.
constexpr int64_t size_of(DType dtype) {
  return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2;
}

// Strides of a view [batch..., head, row, col], in elements. A stride of 0 broadcasts. Strides of
// dimensions that a tensor lacks are not used.
struct Strides {
  std::array<int64_t, kMaxBatchRank> batch{};
  int64_t head = 0;
  int64_t row = 0;
  int64_t col = 0;
  // The tensor has one head for every `head_repeat` key/value heads of the Problem, so that key and
  // value may have different numbers of heads. For key and value only.
  int64_t head_repeat = 1;
};

// The batch dimensions of a call. A batch item has one number, the flat index of them all.
struct Batch {
  int batch_rank = 0;  // 0: one batch item
  std::array<int64_t, kMaxBatchRank> batch_sizes{};

  int64_t batch() const {
    int64_t n = 1;
    for (int d = 0; d < batch_rank; ++d) n *= batch_sizes[d];
    return n;
  }
};

// Where a batch item begins in a tensor, in elements, and `offset` more. Divisions are avoided
// where they would change nothing: one takes 10 to 20 cycles, and a small plane is done in 2000.
inline int64_t batch_offset(const Batch& of, const Strides& strides, int64_t item,
                            int64_t offset = 0) {
  for (int d = of.batch_rank - 1; d > 0; --d) {
    offset += (item % of.batch_sizes[d]) * strides.batch[d];
    item /= of.batch_sizes[d];
  }
  return of.batch_rank > 0 ? offset + item * strides.batch[0] : offset;
}

struct Input {
  const void* data = nullptr;
  Strides strides;
};

struct Output {
  void* data = nullptr;
  Strides strides;
};

}  // namespace qkv
