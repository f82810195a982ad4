#include "tensors/shard.h"

#include <algorithm>

namespace qkv {
namespace {

// The size of the whole, of which there are `size` from `offset` on; 0 stands for just those.
int64_t size_of_whole(const Call& call, const char* name, int64_t offset, int64_t whole,
                      int64_t size) {
  const bool fits = whole == 0 ? offset == 0 : size <= whole && offset <= whole - size;
  TORCH_CHECK_VALUE(fits, call.title(), ": shard has ", size, " ", name, " from number ", offset,
                    " on, of ", whole, ", but they must lie within the whole");
  return whole;
}

}  // namespace

void bind_shard(const Call& call, const Sizes<int64_t>& sizes, Problem& problem) {
  if (call.options.shard.is_whole()) return;
  std::array<int64_t, 7> numbers;
  std::transform(call.options.shard.all.begin(), call.options.shard.all.end(), numbers.begin(),
                 [](const c10::SymInt& number) { return number.guard_int(__FILE__, __LINE__); });
  for (const int64_t number : numbers)
    TORCH_CHECK_VALUE(0 <= number && number <= kLargestShard, call.title(), ": shard is ",
                      c10::ArrayRef<int64_t>(numbers), ", but numbers from 0 to ", kLargestShard,
                      " are expected");
  const auto [query_offset, key_offset, seqlen_q, seqlen_k, head_offset, heads, batch_offset] =
      numbers;
  TORCH_CHECK_VALUE(
      !call.is_packed() || (query_offset | key_offset | seqlen_q | seqlen_k) == 0, call.title(),
      ": shard is ", c10::ArrayRef<int64_t>(numbers),
      ", but the documents of a packed call are whole: query_offset, key_offset, seqlen_q and "
      "seqlen_k must be 0");
  Shard& shard = problem.shard;
  shard.query_offset = query_offset;
  shard.key_offset = key_offset;
  shard.head_offset = head_offset;
  shard.seqlen_q = size_of_whole(call, "queries", query_offset, seqlen_q, sizes.seqlen_q);
  shard.seqlen_k = size_of_whole(call, "keys", key_offset, seqlen_k, sizes.seqlen_k);
  shard.heads = size_of_whole(call, "heads", head_offset, heads, sizes.heads);
  problem.dropout_batch += batch_offset;
}

}  // namespace qkv
