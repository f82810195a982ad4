// Draws one row of a map (common/mask_map.h): the squares of up to kMapQueries queries.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/mask_map.h"

namespace qkv {

// Some rows of a mask: `rows` of them, `row` elements apart, of `cols` elements, `col` apart.
template <class M>
struct MaskRows {
  const M* data;
  int64_t rows, row, cols, col;
};

// kMapKeys elements of a row, or what was found out about as many columns, in vectors that every
// CPU has: GCC compares longer ones element by element.
template <class U>
struct Columns {
  typedef U Vector __attribute__((vector_size(16), may_alias));
  static constexpr int kEach = 16 / sizeof(U), kVectors = int(kMapKeys) / kEach;
  Vector of[kVectors];

  // The elements of a row; those beyond `count` repeat the last one.
  Columns(const void* from, int64_t col, int64_t count) {
    const U* const elements = static_cast<const U*>(from);
    if (col == 1 && count == kMapKeys) {
      std::memcpy(of, elements, sizeof of);
      return;
    }
    U some[kMapKeys];
    for (int64_t j = 0; j < kMapKeys; ++j) some[j] = elements[std::min(j, count - 1) * col];
    std::memcpy(of, some, sizeof of);
  }
  Columns() : of{} {}

  U operator[](int64_t j) const { return of[j / kEach][j % kEach]; }
  bool any() const {
    Vector all{};
    for (const Vector& some : of) all |= some;
    uint64_t words[2];
    std::memcpy(words, &all, sizeof all);
    return (words[0] | words[1]) != 0;
  }
};

// The bits of an element of a mask.
template <class M>
using BitsOf = std::conditional_t<
    sizeof(M) == 8, uint64_t,
    std::conditional_t<sizeof(M) == 4, uint32_t, std::conditional_t<sizeof(M) == 2, uint16_t, M>>>;

// What a mask has where it hides: the bits of -inf, or, if it is boolean, 0.
template <class M>
BitsOf<M> bits_that_hide() {
  BitsOf<M> bits = 0;
  if constexpr (!std::is_same_v<M, uint8_t>) {
    const M hides = narrow<M>(Compute<M>(-HUGE_VAL));
    std::memcpy(&bits, &hides, sizeof bits);
  }
  return bits;
}

// The first and the last column in which `seen` is not 0.
template <class U>
MapSquare square_of(const Columns<U>& seen, int64_t cols, bool is_plain) {
  if (!seen.any()) return {0, 0, false};
  int64_t begin = 0, end = cols;
  while (!seen[begin]) ++begin;
  while (!seen[end - 1]) --end;
  return {uint8_t(begin), uint8_t(end), is_plain};
}

// A square is plain where a boolean mask hides nothing, and where all numbers of a floating one are
// 0, of which no bit is set but the sign. Rows are looked at from the last to the first, since
// under a causal mask the last one sees most, and only until nothing can change any more: of a bias
// that hides nothing and is nowhere 0, one row in kMapQueries is read.
template <class M>
MapSquare draw_square(const MaskRows<M>& mask) {
  using Bits = Columns<BitsOf<M>>;
  const BitsOf<M> hides = bits_that_hide<M>();
  Bits seen, changed;
  for (int64_t r = mask.rows - 1; r >= 0; --r) {
    const Bits row(mask.data + r * mask.row, mask.col, mask.cols);
    for (int n = 0; n < row.kVectors; ++n) {
      const auto shows = (typename Bits::Vector)(row.of[n] != hides);
      seen.of[n] |= shows;
      changed.of[n] |= std::is_same_v<M, uint8_t> ? ~shows : row.of[n] << 1;
    }
    if (seen[0] && seen[mask.cols - 1] && changed.any()) break;
  }
  return square_of(seen, mask.cols, !changed.any());
}

// The keys, of so many, that a row of squares shows, from the squares of these columns.
inline Range keys_of(const MapSquare* squares, Range columns, int64_t keys) {
  Range seen{keys, 0};
  for (int64_t at = columns.begin; at < columns.end; ++at, ++squares) {
    if (squares->begin >= squares->end) continue;
    seen.begin = std::min(seen.begin, at * kMapKeys + squares->begin);
    seen.end = at * kMapKeys + squares->end;
  }
  return seen;
}

// Those of these columns.
template <class M>
void draw_squares(const MaskRows<M>& mask, Range columns, MapSquare* squares) {
  for (int64_t j = columns.begin * kMapKeys; j < columns.end * kMapKeys; j += kMapKeys)
    *squares++ = draw_square(MaskRows<M>{mask.data + j * mask.col, mask.rows, mask.row,
                                         std::min(kMapKeys, mask.cols - j), mask.col});
}

// Calls see(begin, end) for what each of the `count` spans of a row shows of these keys, if any.
template <class F>
void for_each_span(const int32_t* span, int64_t col, int64_t count, Range keys, const F& see) {
  for (int64_t n = 0; n < count; ++n, span += 2 * col) {
    const auto begin = std::max<int64_t>(keys.begin, span[0]);
    const auto end = std::min<int64_t>(keys.end, span[col]);
    if (begin < end) see(begin, end);
  }
}

// Of these keys, those from the first to the last that some rows of spans show.
inline Range keys_of_spans(const MaskRows<int32_t>& spans, int64_t count, Range keys) {
  Range seen{keys.end, 0};
  for (int64_t r = 0; r < spans.rows; ++r)
    for_each_span(spans.data + r * spans.row, spans.col, count, keys,
                  [&](int64_t begin, int64_t end) {
                    seen = {std::min(seen.begin, begin), std::max(seen.end, end)};
                  });
  return seen;
}

// The squares of `rows` rows of spans, `count` in each, of [0, keys), in these columns, which may
// be fewer than the spans show. A square is plain if every row has a span that covers it. Up to the
// end, is_plain counts how many more rows cover the square than the one before it. Spans may come
// in any order, and may overlap: what a row's span covers before one that was counted is seen, but
// not counted, and so not plain.
inline void draw_spans(const MaskRows<int32_t>& spans, int64_t count, int64_t keys, Range columns,
                       MapSquare* squares) {
  for (int64_t at = columns.begin; at < columns.end; ++at)
    squares[at - columns.begin] = {uint8_t(kMapKeys), 0, 0};
  const auto square_of = [&](int64_t at) -> MapSquare& { return squares[at - columns.begin]; };
  const auto see = [&](int64_t at, int64_t begin, int64_t end) {
    MapSquare& square = square_of(at);
    square.begin = std::min(square.begin, uint8_t(std::max<int64_t>(0, begin - at * kMapKeys)));
    square.end = std::max(square.end, uint8_t(std::min(kMapKeys, end - at * kMapKeys)));
  };
  const Range drawn{columns.begin * kMapKeys, std::min(columns.end * kMapKeys, keys)};
  for (int64_t r = 0; r < spans.rows; ++r) {
    int64_t counted = 0;  // squares before it are not counted for this row again
    const auto draw = [&](int64_t begin, int64_t end) {
      const int64_t first = begin / kMapKeys, last = (end - 1) / kMapKeys;
      see(first, begin, end), see(last, begin, end);
      int64_t from = (begin + kMapKeys - 1) / kMapKeys;
      const int64_t to = end == drawn.end ? columns.end : end / kMapKeys;
      for (; from < std::min(counted, to); ++from) see(from, begin, end);
      if (from >= to) return;
      ++square_of(from).is_plain;
      if (to < columns.end) --square_of(to).is_plain;
      counted = to;
    };
    for_each_span(spans.data + r * spans.row, spans.col, count, drawn, draw);
  }
  for (int64_t at = columns.begin, rows = 0; at < columns.end; ++at) {
    rows += square_of(at).is_plain;
    square_of(at).is_plain = rows == spans.rows;
    if (rows > 0) see(at, 0, keys);
  }
}

}  // namespace qkv
