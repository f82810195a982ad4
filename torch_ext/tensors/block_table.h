// Keys and values in blocks: where those of each sequence are.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace qkv {

// The blocks that each sequence needs, checked and copied.
class BlockTable {
 public:
  // Sequence n has lengths[n] keys. Throws c10::Error where `block_table` is too short, or where
  // one of these blocks is not among the `blocks` of the argument `pool`.
  BlockTable(const char* op, const char* pool, const at::Tensor& block_table, int64_t blocks,
             int64_t block_size, c10::ArrayRef<int64_t> lengths);

  const int32_t* operator[](int64_t n) const { return &blocks_[begins_[n]]; }

 private:
  std::vector<int32_t> blocks_;  // not empty: no sequence gets a null pointer
  std::vector<int64_t> begins_;
};

}  // namespace qkv
