// Rows of keys or values, in one tensor or in pages, and how they are fetched into the cache while
// others are multiplied.
#pragma once

#include "kernels/operands/operands.h"
#include "kernels/products/row_ahead.h"

namespace qkv::QKV_ISA {

// The most keys of a block, and of one whose scores become a tile, on which options work: whole
// steps of the softmax (few_softmax.h) for every number of lanes. A block of 192 keys is 1.05 to
// 1.15 times as fast as one of 96 (Zen 5, keys in the second-level cache); one of 384 as fast as
// one of 192.
constexpr int64_t kFewKeys = kFixedBits ? kFixedKeys : 192;
constexpr int64_t kFewTileKeys = kFixedBits ? kFixedKeys : 96;
// The keys of a block whose rows have `dim` elements: two blocks, one that is multiplied and one
// that is fetched, are to leave room in a second-level cache of 512 KiB.
template <class E>
int64_t few_block_keys(int64_t dim) {
  return dim * int64_t(sizeof(E)) <= 512 ? kFewKeys : kFewTileKeys;
}
// Elements from one row of scores to the next. A product takes kFewAtOnce keys at a time, and
// writes up to kFewPad scores beyond the last one, which the next product, or the softmax,
// overwrites.
constexpr int64_t kFewPad = 16, kFewStep = kFewKeys + kFewPad;

// Up to so many queries multiply rows as fast as memory gives them, and each row that is multiplied
// fetches another. Beside more, what is fetched is spread over all of their products (FewAhead).
constexpr int kVeryFew = 2;

// Where some rows begin. A product takes some at a time (kFewAtOnce), and may read a few behind the
// last one. While it multiplies a row, it fetches the one that is `ahead` places further: with 0
// the row itself, which costs nothing. Products that read the same rows take turns of `turn` rows.
template <class E>
struct FewPlaces {
  const E* const* rows;
  int64_t count, ahead = 0, turn = kFewKeys;
};

// So many places, or a multiple of it, are whole steps of every product.
constexpr int64_t kFewPlaces = 48;

// to = the places of rows [key, key + keys), if there are any, and behind them the last place again
// and again, up to a multiple of kFewPlaces that is at least `least`. Returns the end.
template <class E>
const E** few_places(const KeyRows<E>& rows, int64_t key, int64_t keys, const E** to,
                     int64_t least = 1) {
  keys = std::max<int64_t>(keys, 0);
  if (keys > 0) rows.places().addresses(key, keys, to);
  const E** const end = to + (std::max(keys, least) + kFewPlaces - 1) / kFewPlaces * kFewPlaces;
  std::fill(to + keys, end, to[keys - 1]);
  return end;
}

// How many places ahead rows of `dim` elements are fetched, beside `rows` queries.
//
// They come into the first-level cache, and beside few queries they are few enough to stay there
// until they are multiplied. Were they fetched into the second-level cache, a block of 192 rows
// ahead, one thread of a Zen 5 would take up to 1.5 times as long from memory, and one query 1.2 to
// 1.5 times as long where keys and values are in that cache. With 8 KiB instead of 4, one or two
// queries take 1.0 to 1.1 times as long; more of them take turns (in_turns), which are longer then.
//
// Rows that are so long that blocks are short have many products, for which turns are too short;
// and where bits are fixed there are none. Those rows are fetched a block ahead.
constexpr int64_t kFewMostAhead = 128;
template <class E>
int64_t few_rows_ahead(int64_t rows, int64_t dim) {
  const int64_t block = few_block_keys<E>(dim);
  if (kFixedBits || block < kFewKeys) return block;
  const int64_t bytes = rows > 4 ? 32768 : rows > kVeryFew ? 16384 : 4096;
  return std::clamp<int64_t>(bytes / (dim * int64_t(sizeof(E))), 16, kFewMostAhead);
}

// Returns FewPlaces::turn of products that read the same rows, for each of which each(f) calls f:
// fewer than are fetched ahead, so that all find in the cache what is fetched for them. A turn of
// values is a sum of its own. So it depends on nothing that leaves the bits of an output as they
// are, such as the number of keys, or whether a value that is hidden is finite.
template <class E, class Each>
int64_t few_turn(int64_t rows, int64_t dim, const Each& each) {
  int64_t products = 0;
  each([&](auto...) { ++products; });
  const int64_t ahead = few_rows_ahead<E>(rows, dim);
  return products == 1 || ahead == few_block_keys<E>(dim) ? kFewKeys : ahead / 16 * 12;
}

// Fetches N elements of a row.
//
// Where a page begins, one some pages ahead is looked up, as if rows lay one behind the other: with
// pages of 4 KiB, one thread of a virtual Zen 5 takes 0.85 to 0.97 of the time by it, but with rows
// of int8 1.0 to 1.1.
template <int N, class E>
QKV_INLINE void fetch(const E* part) {
  QKV_UNROLL
  for (int d = 0; d < N; d += int(kCacheLine / sizeof(E))) __builtin_prefetch(part + d);
  if (sizeof(E) > 1 && reinterpret_cast<uintptr_t>(part) % kPage < N * sizeof(E))
    touch_pages(part + kRowAhead / int64_t(sizeof(E)), 1);
}

// Paged keys and values of no more bytes in all are taken to be in a second-level cache.
constexpr double kNearKeys = 1 << 20;

// Has the CPU look up where a call's keys or values [key, key + keys) lie, which are read next, if
// they are in a cache's pages: it foresees none. bf16 in pages of 4 KiB takes 0.92 to 0.96 of the
// time from memory by it (Zen 5); 1.05 in a second-level cache, and 1.2 with pages of one row. It
// is inlined: GCC drops calls of a function that only prefetches.
template <class E>
QKV_INLINE void look_up_pages(const Problem& p, const KeyRows<E>& rows, int64_t key, int64_t keys) {
  const RowPlaces<E>& places = rows.places();
  const int64_t bytes = places.row * int64_t(sizeof(E));
  if (!places.pages || places.pages->size * bytes < kPage / 2 || bytes_of_keys<E>(p) <= kNearKeys)
    return;
  places.for_each_piece(key, keys, [&](const E* from, int64_t count, int64_t) QKV_INLINE_LAMBDA {
    touch_pages(from, count * bytes);
  });
}

// How rows are fetched beside products of more than kVeryFew queries: whole rows, evenly in `steps`
// calls of step(). A line of them between every few multiplications took 1.2 to 1.4 times as long
// (Zen 3); and a CPU drops requests that find no room beside those that are open: of 192 lines at
// once, a Zen 5 drops 10 to 15 %.
template <class E>
class FewAhead {
 public:
  // Beside products with `rows`, of `dim` elements each.
  FewAhead(const FewPlaces<E>& rows, int64_t dim)
      : next_(rows.rows + rows.ahead), count_(rows.ahead > 0 ? rows.count : 0), dim_(dim) {}

  int64_t steps = 0;
  QKV_INLINE void step() {
    for (due_ += count_; due_ >= steps; due_ -= steps) fetch_row(*next_++);
  }

 private:
  static constexpr int kLine = int(kCacheLine / sizeof(E));

  // Some lines at a time: a loop over single lines costs more.
  QKV_INLINE void fetch_row(const E* row) const {
    if (dim_ % (4 * kLine) == 0) return fetch_lines<4>(row);
    if (dim_ % (2 * kLine) == 0) return fetch_lines<2>(row);
    fetch_lines<1>(row);
  }
  template <int LINES>
  QKV_INLINE void fetch_lines(const E* row) const {
    for (int64_t d = 0; d < dim_; d += LINES * kLine) fetch<LINES * kLine>(row + d);
  }

  const E* const* next_;
  const int64_t count_, dim_;
  int64_t due_ = 0;
};

// Makes products that read the same rows, of `dim` elements each, in turns: each(g) calls g(row,
// which...) for every product, where `row` is its first query; steps(count, which...) is how often
// it calls ahead.step() for `count` of the rows; and make(some, ahead, at, row, which...) makes it
// for some rows, from place `at` on. Without FewAhead, the products of the first query fetch.
template <class E, class Each, class Steps, class Make>
QKV_INLINE void in_turns(FewPlaces<E> rows, int64_t dim, const Each& each, const Steps& steps,
                         const Make& make) {
  const auto for_all = [&](const auto& g) {
    for (int64_t at = 0; at < rows.count; at += rows.turn)
      each([&](int64_t row, auto... which) {
        const int64_t count = std::min(rows.turn, rows.count - at);
        g(FewPlaces<E>{rows.rows + at, count, row == 0 ? rows.ahead : 0}, at, row, which...);
      });
  };
  FewAhead<E> ahead(rows, dim);
  for_all([&](FewPlaces<E> some, int64_t, int64_t, auto... which) {
    ahead.steps += steps(some.count, which...);
  });
  for_all([&](FewPlaces<E> some, int64_t at, int64_t row, auto... which) {
    make(some, ahead, at, row, which...);
  });
}

}  // namespace qkv::QKV_ISA
