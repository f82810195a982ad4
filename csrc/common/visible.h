// Which keys a query may see, as far as the positions i of the query and j of the key decide it:
// is_causal and the window do. A query sees one range of keys, and neither end of it falls from one
// query to the next, so neighbouring queries together see one range, too.
#pragma once

#include <algorithm>

#include "attention.h"

namespace qkv {

// Keys, rows or strips [begin, end).
struct Range {
  int64_t begin = 0, end = 0;
  bool is_empty() const { return begin >= end; }
};

// Whether positions can hide any key from any query.
inline bool hides_positions(const Problem& p) {
  return p.is_causal || p.window_left >= 0 || p.window_right >= 0;
}

// Query i sees keys [key_begin(p, i), key_end(p, i)); none, if the beginning is not before the end.
inline int64_t key_begin(const Problem& p, int64_t i) {
  if (p.window_left < 0) return 0;
  return std::clamp<int64_t>(i + p.bottom_right() - p.window_left, 0, p.seqlen_k);
}
inline int64_t key_end(const Problem& p, int64_t i) {
  int64_t end = p.seqlen_k;
  if (p.is_causal) end = std::min(end, i + p.top_left() + 1);
  if (p.window_right >= 0) end = std::min(end, i + p.bottom_right() + p.window_right + 1);
  return std::max<int64_t>(end, 0);
}

// Keys [begin, end) are seen by no query outside [query_begin, query_end).
inline int64_t query_begin(const Problem& p, int64_t begin) {
  int64_t first = p.is_causal ? begin - p.top_left() : 0;
  if (p.window_right >= 0) first = std::max(first, begin - p.bottom_right() - p.window_right);
  return std::clamp<int64_t>(first, 0, p.seqlen_q);
}
inline int64_t query_end(const Problem& p, int64_t end) {
  if (p.window_left < 0) return p.seqlen_q;
  return std::clamp<int64_t>(end - p.bottom_right() + p.window_left, 0, p.seqlen_q);
}

// Whether some of queries [first, last] do not see all of keys [begin, end).
inline bool hides_positions(const Problem& p, int64_t first, int64_t last, int64_t begin,
                            int64_t end) {
  return key_end(p, first) < end || key_begin(p, last) > begin;
}

// Masks, or spans of keys.
inline bool has_masks(const Problem& p) {
  for (const Mask& mask : p.masks)
    if (mask.type != MaskType::none) return true;
  return p.key_spans.input.data != nullptr;
}

// Whether a score program can.
inline bool hides_by_function(const Problem& p) {
  return p.function && p.function->program->hides();
}

// Whether positions, a mask or a score program can hide any key from any query.
inline bool hides_any(const Problem& p) {
  return hides_positions(p) || has_masks(p) || hides_by_function(p);
}

// About how many keys a query sees, for the drivers' estimates of work. Only a window that is
// closed on both sides makes them fewer; is_causal closes the right side, but alone does not count.
inline int64_t visible_keys(const Problem& p) {
  int64_t keys = p.seqlen_k;
  if (p.window_left >= 0 && (p.window_right >= 0 || p.is_causal))
    keys = std::min(keys, p.window_left + 1 + std::max<int64_t>(p.window_right, 0));
  return keys;
}

}  // namespace qkv
