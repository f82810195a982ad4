#include "ops/kvcache/rows.h"

#include <algorithm>
#include <limits>

#include "tensors/indices.h"
#include "tensors/option_numbers.h"

namespace qkv::ops {
namespace {

void set_lengths(const Call& call, const Sizes<int64_t>& sizes, CacheRows& all) {
  const char* op = call.title();
  const int64_t room = sizes.seqlen_k;
  if (!call.has(arg::cache_seqlens)) {
    for (Span& span : all.spans) span.seqlen_k = room;
    return;
  }
  const Indices lengths(call[arg::cache_seqlens]);
  for (size_t b = 0; b < all.spans.size(); ++b) {
    const int64_t length = lengths[b];
    TORCH_CHECK(length >= 0, op, ": cache_seqlens[", b, "] is ", length,
                ", but 0 or more is expected");
    TORCH_CHECK(length <= room - all.new_rows, op, ": cache_seqlens[", b, "] is ", length,
                " and key has ", all.new_rows, " rows, but ",
                is_paged(call) ? "the blocks of a row of block_table have room for "
                               : "k_cache has room for ",
                room);
    all.spans[b].seqlen_k = length + all.new_rows;
  }
}

void set_hidden(const Call& call, CacheRows& all) {
  if (!call.has(arg::cache_leftpad)) return;
  const Indices hidden(call[arg::cache_leftpad]);
  for (size_t b = 0; b < all.spans.size(); ++b) {
    const int64_t keys = hidden[b], length = all.length(b);
    TORCH_CHECK(0 <= keys && keys <= length, call.title(), ": cache_leftpad[", b, "] is ", keys,
                ", but 0 to cache_seqlens[", b, "] = ", length, " is expected");
    all.spans[b].key_begin = keys;
    all.spans[b].seqlen_k -= keys;
  }
}

void set_rows(const Call& call, CacheRows& all) {
  const int64_t B = all.spans.size(), rows = call[arg::key].sizes()[0];
  if (is_paged(call)) return;
  if (!call.has(arg::cache_batch_idx)) {
    for (int64_t b = 0; b < B; ++b) all.spans[b].key_item = b;
    return;
  }
  const Indices index(call[arg::cache_batch_idx]);
  c10::SmallVector<int64_t, 16> used;
  for (int64_t b = 0; b < B; ++b) {
    const int64_t row = all.spans[b].key_item = index[b];
    TORCH_CHECK(0 <= row && row < rows, call.title(), ": cache_batch_idx[", b, "] is ", row,
                ", but k_cache has ", rows, " rows; expected 0 to ", rows - 1);
    used.push_back(row);
  }
  if (!appends(call)) return;
  std::sort(used.begin(), used.end());
  const auto twice = std::adjacent_find(used.begin(), used.end());
  TORCH_CHECK(twice == used.end(), call.title(), ": cache_batch_idx has ",
              twice == used.end() ? 0 : *twice,
              " more than once, but with key every batch item must write to a row of its own");
}

// Rows of one block.
struct Slots {
  int64_t block, begin, end;
  size_t batch;
};

void check_slots(const Call& call, const CacheRows& all) {
  if (!is_paged(call)) return;
  const int64_t size = call[arg::key].sizes()[2];
  std::vector<Slots> written;
  written.reserve(all.spans.size() * (all.new_rows / size + 2));
  for (size_t b = 0; b < all.spans.size(); ++b) {
    const int64_t end = all.length(b) + all.new_rows;
    for (int64_t at = all.length(b), next; at < end; at = next) {
      next = std::min(end, (at / size + 1) * size);
      const int64_t begin = at % size;
      written.push_back({all.spans[b].pages[at / size], begin, begin + next - at, b});
    }
  }
  std::sort(written.begin(), written.end(), [](const Slots& a, const Slots& b) {
    return std::tie(a.block, a.begin) < std::tie(b.block, b.begin);
  });
  for (size_t i = 1; i < written.size(); ++i) {
    const Slots &a = written[i - 1], &b = written[i];
    TORCH_CHECK(a.block != b.block || a.end <= b.begin, call.title(),
                ": block_table makes batch items ", std::min(a.batch, b.batch), " and ",
                std::max(a.batch, b.batch), " write to the same row, ", b.begin, " of block ",
                b.block, "; give each a block of its own");
  }
}

}  // namespace

std::vector<int32_t> set_pages(const Call& call, int64_t block_size, std::vector<Span>& spans) {
  const char *op = call.title(), *pool = call.name_of(arg::key);
  const int64_t blocks = call[arg::key].sizes()[0], columns = call[arg::block_table].sizes()[1];
  TORCH_CHECK(blocks <= std::numeric_limits<int32_t>::max(), op, ": ", pool, " has ", blocks,
              " blocks, but at most ", std::numeric_limits<int32_t>::max(), " are expected");
  const auto needed = [&](const Span& span) {
    return span.seqlen_k / block_size + (span.seqlen_k % block_size > 0);
  };
  int64_t total = 1;  // not empty: no sequence gets a null pointer
  for (size_t n = 0; n < spans.size(); ++n) {
    TORCH_CHECK(needed(spans[n]) <= columns, op, ": block_table has ", columns,
                " columns, but sequence ", n, " has ", spans[n].seqlen_k, " keys, which need ",
                needed(spans[n]), " blocks of ", block_size, " rows");
    total += needed(spans[n]);
  }
  const Indices table(call[arg::block_table]);
  std::vector<int32_t> pages(total);
  int32_t* next = pages.data();
  for (size_t n = 0; n < spans.size(); ++n) {
    spans[n].pages = next;
    for (int64_t i = 0; i < needed(spans[n]); ++i) {
      const int64_t block = table.at(n, i);
      TORCH_CHECK(0 <= block && block < blocks, op, ": block_table[", n, ", ", i, "] is ", block,
                  ", but ", pool, " has ", blocks, " blocks; expected 0 to ", blocks - 1);
      *next++ = int32_t(block);
    }
  }
  return pages;
}

CacheRows cache_rows(const Call& call, const Sizes<int64_t>& sizes) {
  CacheRows all;
  all.spans.resize(sizes.batch[0], {0, sizes.seqlen_q, 0, 0, 0, nullptr});
  if (appends(call)) all.new_rows = call[arg::new_key].sizes()[2];
  set_lengths(call, sizes, all);
  set_hidden(call, all);
  set_rows(call, all);
  for (size_t b = 0; b < all.spans.size(); ++b)
    check_masks_cover(call, int64_t(b), sizes.seqlen_q, all.spans[b].seqlen_k);
  // Before the caches are written to.
  if (appends(call) && call.has(arg::spans)) check_spans(call, sizes);
  if (is_paged(call)) all.pages = set_pages(call, call[arg::key].sizes()[2], all.spans);
  if (all.new_rows > 0) check_slots(call, all);
  return all;
}

}  // namespace qkv::ops
