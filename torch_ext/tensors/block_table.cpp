#include "tensors/block_table.h"

#include <limits>

#include "tensors/indices.h"

namespace qkv {

BlockTable::BlockTable(const char* op, const char* pool, const at::Tensor& block_table,
                       int64_t blocks, int64_t block_size, c10::ArrayRef<int64_t> lengths) {
  TORCH_CHECK(blocks <= std::numeric_limits<int32_t>::max(), op, ": ", pool, " has ", blocks,
              " blocks, but at most ", std::numeric_limits<int32_t>::max(), " are expected");
  const Indices table(block_table);
  const auto needed = [&](int64_t n) {
    return lengths[n] / block_size + (lengths[n] % block_size > 0);
  };
  int64_t total = 0;
  begins_.reserve(lengths.size());
  for (size_t n = 0; n < lengths.size(); ++n) {
    TORCH_CHECK(needed(n) <= block_table.sizes()[1], op, ": block_table has ",
                block_table.sizes()[1], " columns, but sequence ", n, " has ", lengths[n],
                " keys, which need ", needed(n), " blocks of ", block_size, " rows");
    begins_.push_back(total);
    total += needed(n);
  }
  blocks_.reserve(total + 1);
  for (size_t n = 0; n < lengths.size(); ++n)
    for (int64_t i = 0; i < needed(n); ++i) {
      const int64_t block = table.at(n, i);
      TORCH_CHECK(0 <= block && block < blocks, op, ": block_table[", n, ", ", i, "] is ", block,
                  ", but ", pool, " has ", blocks, " blocks; expected 0 to ", blocks - 1);
      blocks_.push_back(int32_t(block));
    }
  blocks_.push_back(0);
}

}  // namespace qkv
