// What a mask shows, seen from afar: for each square of it, of some queries and some keys, which of
// these keys any of the queries may see, and whether the square is plain, which is to say that the
// mask changes none of its scores. Maps are made once a call, and of each piece of memory once,
// however many heads and batch items read it (drivers/mask_maps.h). Passes then leave out what
// masks hide, and read masks only where they say something about single pairs.
//
// To leave a hidden pair out changes no bit: its weight is 0, and where all keys of a row's block
// are hidden its maximum is -inf, so that what has been summed before would be multiplied by 1.
// Gaps between keys that are seen are the exception: behind one, a sum begins anew before it is
// added to the others (kernels/passes/walk.h).
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/half.h"
#include "common/strides.h"
#include "common/visible.h"

namespace qkv {

// The type of a floating mask's elements: both types are in one order.
constexpr MaskType mask_type(DType dtype) { return MaskType(int(MaskType::f32) + int(dtype)); }
static_assert(mask_type(DType::f64) == MaskType::f64 && mask_type(DType::f16) == MaskType::f16);

// Calls f(M{}) for the type M of a mask's elements, which are bytes of a boolean one; not at all if
// there is no mask.
template <class F>
void with_elements(MaskType type, const F& f) {
  if (type == MaskType::boolean)
    f(uint8_t{});
  else if (type != MaskType::none)
    with_type(DType(int(type) - int(MaskType::f32)), f);
}

// The sizes of a square. 16 queries are a tile of f32 on AVX2 and half of one on AVX-512; squares
// as high as the largest tile would show more than smaller tiles see.
constexpr int64_t kMapQueries = 16, kMapKeys = 64;

// Keys [begin, end), counted from the first one of the square, are those that a query of it sees.
struct MapSquare {
  uint8_t begin, end;
  int8_t is_plain;  // 0 or 1
};

// The columns of squares in which some keys lie.
inline Range columns_of(Range keys) {
  return {keys.begin / kMapKeys, (keys.end + kMapKeys - 1) / kMapKeys};
}

// The squares of the same queries, of which no query sees a key outside `keys`. Columns in which
// there is nothing to see need not have squares: a map would grow with the square of the length.
struct MapRow {
  const MapSquare* squares = nullptr;
  int64_t first_column = 0;  // that of squares[0]
  Range keys;

  // That of a column of `keys`.
  const MapSquare& square(int64_t column) const { return squares[column - first_column]; }
  bool is_plain(int64_t column) const {
    const Range columns = columns_of(keys);
    return column >= columns.begin && column < columns.end && square(column).is_plain;
  }
};

// The map of one mask. With Problem::spans, every batch item has rows of its own, from item_rows[b]
// on: those of one head after the other.
struct MaskMap {
  const MapRow* rows = nullptr;  // null: there is no such mask
  // Those of the rows, in rows: 0 in a dimension in which the mask's own stride is 0.
  Strides strides;
  const int64_t* item_rows = nullptr;

  int64_t rows_of(const Problem& p) const {
    return strides.row ? (p.seqlen_q + kMapQueries - 1) / kMapQueries : 1;
  }
  const MapRow* rows_of(const Problem& p, int64_t batch, int64_t head) const {
    if (!item_rows) return rows + plane_offset(p, strides, batch, head);
    return rows + item_rows[batch] + (strides.head ? head * rows_of(p) : 0);
  }
};

// Problem::masks have a map each, in their order, and the spans have the last one.
constexpr int kMaps = kMasks + 1, kSpansMap = kMasks;
struct MaskMaps {
  MaskMap of[kMaps];
};
inline bool has_map(const Problem& p, int which) {
  return which == kSpansMap ? p.key_spans.input.data != nullptr
                            : p.masks[which].type != MaskType::none;
}
inline const Input& mask_of(const Problem& p, int which) {
  return which == kSpansMap ? p.key_spans.input : p.masks[which].input;
}

// Queries [first, last] of the heads of a plane.
struct MapView {
  Plane plane;
  int64_t first, last;

  // Calls see(row) for each row of the map that has one of these queries.
  template <class F>
  void for_each_row(const Problem& p, const MaskMap& map, const F& see) const {
    const int64_t begin = map.strides.row ? first / kMapQueries : 0;
    const int64_t end = map.strides.row ? last / kMapQueries : 0;
    const int64_t heads = map.strides.head ? p.group() : 1;
    for (int64_t head = 0; head < heads; ++head) {
      const MapRow* const rows = map.rows_of(p, plane.batch, plane.kv_head * p.group() + head);
      for (int64_t row = begin; row <= end; ++row) see(rows[row]);
    }
  }

  // Whether the mask changes no score of these queries and keys [key, end).
  bool is_plain(const Problem& p, const MaskMap& map, int64_t key, int64_t end) const {
    bool plain = true;
    end = std::min(end, p.seqlen_k);
    for_each_row(p, map, [&](const MapRow& row) {
      for (int64_t at = key / kMapKeys; plain && at * kMapKeys < end; ++at)
        plain = row.is_plain(at);
    });
    return plain;
  }
};

// Whether no mask changes a score of these queries and keys [key, end).
inline bool masks_are_plain(const Problem& p, const MapView& view, int64_t key, int64_t end) {
  for (const MaskMap& map : p.maps->of)
    if (map.rows && !view.is_plain(p, map, key, end)) return false;
  return true;
}

// Those of `keys`, or a range around them, that no mask hides from all of the queries.
inline Range keys_shown(const Problem& p, const MapView& view, Range keys) {
  for (const MaskMap& map : p.maps->of) {
    if (!map.rows) continue;
    Range shown{keys.end, keys.begin};
    view.for_each_row(p, map, [&](const MapRow& row) {
      const int64_t begin = std::max(keys.begin, row.keys.begin);
      const int64_t end = std::min(keys.end, row.keys.end);
      for (int64_t at = begin / kMapKeys; at * kMapKeys < end; ++at) {
        const MapSquare& square = row.square(at);
        if (square.begin >= square.end) continue;
        shown.begin = std::min(shown.begin, at * kMapKeys + square.begin);
        shown.end = std::max(shown.end, at * kMapKeys + square.end);
      }
    });
    keys = {std::max(shown.begin, keys.begin), std::min(shown.end, keys.end)};
  }
  return keys;
}

// The same of all keys, looked up row by row: a range around those of keys_shown.
inline Range all_keys_shown(const Problem& p, const MapView& view, Range keys) {
  for (const MaskMap& map : p.maps->of) {
    if (!map.rows) continue;
    Range shown{p.seqlen_k, 0};
    view.for_each_row(p, map, [&](const MapRow& row) {
      shown = {std::min(shown.begin, row.keys.begin), std::max(shown.end, row.keys.end)};
    });
    keys = {std::max(keys.begin, shown.begin), std::min(keys.end, shown.end)};
  }
  return keys;
}

}  // namespace qkv
