#include "tensors/option_numbers.h"

#include <algorithm>
#include <limits>

#include "tensors/copies.h"

namespace qkv {
namespace {

// The largest number of a shard, so that no sum of a few of them overflows.
constexpr int64_t kLargestShard = int64_t{1} << 40;

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
  problem.shard = {query_offset,
                   key_offset,
                   head_offset,
                   size_of_whole(call, "queries", query_offset, seqlen_q, sizes.seqlen_q),
                   size_of_whole(call, "keys", key_offset, seqlen_k, sizes.seqlen_k),
                   size_of_whole(call, "heads", head_offset, heads, sizes.heads)};
  problem.dropout_batch += batch_offset;
}

void check_spans(const Call& call, const Sizes<int64_t>& sizes) {
  // Documents and rows of a cache have fewer keys than all of them, and spans end with those.
  const bool is_open = sizes.packed || sizes.is_cache;
  const int64_t last = is_open ? std::numeric_limits<int32_t>::max() : sizes.seqlen_k;
  at::Tensor spans = call[arg::spans];
  for (int64_t d = 0; d + 1 < spans.dim(); ++d)  // what broadcasts is looked at once
    if (spans.strides()[d] == 0 && spans.sizes()[d] > 1) spans = spans.narrow(d, 0, 1);
  spans = aligned(spans.contiguous());
  const int32_t* const numbers = spans.const_data_ptr<int32_t>();
  for (int64_t n = 0; n < spans.numel(); n += 2) {
    const int64_t begin = numbers[n], end = numbers[n + 1];
    if (0 <= begin && begin <= end && end <= last) continue;
    const int64_t columns = spans.sizes().back();
    at::DimVector row(spans.sizes().slice(0, spans.dim() - 1));
    for (int64_t d = row.size(), left = n / columns; d-- > 0;) {
      const int64_t size = row[d];
      row[d] = left % size;
      left /= size;
    }
    TORCH_CHECK_VALUE(false, call.title(), ": spans", at::IntArrayRef(row), " has the span ",
                      n % columns / 2, " from ", begin, " to ", end, ", but 0 <= begin <= end",
                      is_open ? "" : c10::str(" <= ", sizes.seqlen_k), " is expected");
  }
}

}  // namespace qkv
