#include "tensors/option_numbers.h"

#include <algorithm>
#include <limits>

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

// The places that differ in memory: a dimension that broadcasts has one.
struct SpansCheck {
  const at::Tensor& spans;
  const int64_t last;
  std::vector<int64_t> place;  // the index of a row, once it is known to be bad

  // Whether all spans are good, with the first `dim` indices behind `data`.
  bool holds(const int32_t* data, int64_t dim) {
    const int64_t size = spans.sizes()[dim], stride = spans.strides()[dim];
    if (dim + 1 == spans.dim()) return holds_row(data, size, stride);
    for (int64_t i = 0; i < (stride == 0 ? std::min<int64_t>(size, 1) : size); ++i) {
      if (holds(data + i * stride, dim + 1)) continue;
      place.insert(place.begin(), i);
      return false;
    }
    return true;
  }
  bool holds_row(const int32_t* row, int64_t size, int64_t stride) {
    for (int64_t n = 0; n < size; n += 2) {
      const int64_t begin = row[n * stride], end = row[(n + 1) * stride];
      if (0 <= begin && begin <= end && end <= last) continue;
      place = {n / 2, begin, end};
      return false;
    }
    return true;
  }
};

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
  const at::Tensor& spans = call[arg::spans];
  if (spans.numel() == 0) return;
  // Documents and rows of a cache have fewer keys than all of them, and spans end with those.
  const bool is_open = sizes.packed || sizes.is_cache;
  SpansCheck check{spans, is_open ? std::numeric_limits<int32_t>::max() : sizes.seqlen_k, {}};
  if (check.holds(spans.const_data_ptr<int32_t>(), 0)) return;
  const int64_t* const found = check.place.data() + check.place.size() - 3;
  const at::IntArrayRef row(check.place.data(), check.place.size() - 3);
  TORCH_CHECK_VALUE(false, call.title(), ": spans", row, " has the span ", found[0], " from ",
                    found[1], " to ", found[2], ", but 0 <= begin <= end",
                    is_open ? "" : c10::str(" <= ", sizes.seqlen_k), " is expected");
}

}  // namespace qkv
