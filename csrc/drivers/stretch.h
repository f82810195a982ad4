// Batch items of one size, which are cut into work items alike, and the problem of each.
#pragma once

#include <optional>
#include <vector>

#include "attention.h"
#include "common/strides.h"

namespace qkv {

// The problem of one batch item: the call's own, or, with spans, a copy that has the item's sizes
// and rows. So the kernels see no spans, and there is no copy for each item of a call, but only for
// those that are being worked on.
class ItemProblem {
 public:
  ItemProblem(const Problem& p, int64_t batch) : p_(&p) {
    if (p.spans) p_ = &own_.emplace(p.item(batch));
  }
  ItemProblem(const ItemProblem&) = delete;
  const Problem& operator*() const { return *p_; }
  const Problem* operator->() const { return p_; }

 private:
  const Problem* p_;
  std::optional<Problem> own_;
};

// Batch items [first, first + count). The planes of a stretch are numbered item by item.
struct Stretch {
  int64_t first = 0, count = 0;

  Plane plane(const Problem& p, int64_t number) const {
    return {first + number / p.kv_heads, number % p.kv_heads};
  }
};

// All batch items of a problem; with spans, a stretch has only neighbours of one size, and of keys
// that all lie in pages or all in rows, which need other memory; or, if one_by_one, one item, so
// that items can be worked off in their order. Items without queries have results only in a
// backward pass: the gradients of their keys, which are 0.
inline std::vector<Stretch> stretches_of(const Problem& p, bool one_by_one = false,
                                         bool without_queries = false) {
  const int64_t items = p.batch();
  if (items == 0 || p.heads == 0) return {};
  if (!p.spans) return {{0, items}};
  std::vector<Stretch> all;
  for (int64_t b = 0; b < items; ++b) {
    const Span& span = p.spans[b];
    if (span.seqlen_q == 0 && !without_queries) continue;
    if (!one_by_one && !all.empty() && all.back().first + all.back().count == b) {
      const Span& before = p.spans[b - 1];
      if (before.seqlen_q == span.seqlen_q && before.seqlen_k == span.seqlen_k &&
          !before.pages == !span.pages) {
        ++all.back().count;
        continue;
      }
    }
    all.push_back({b, 1});
  }
  return all;
}

}  // namespace qkv
