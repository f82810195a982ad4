// Rows of keys or values, in one tensor or in pages, and how they are fetched into the cache while
// others are multiplied.
#pragma once

#include "kernels/operands/ask_rows.h"
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

// Where some rows begin. A product takes some at a time (kFewAtOnce): behind the last one are
// kFewPad more, whichever they are.
template <class E>
struct FewPlaces {
  const E* const* rows;
  int64_t count;
};

// Returns the places of rows [key, key + keys), and behind them the last one again and again; none
// if keys <= 0. memory: [keys + kFewPad].
template <class E>
FewPlaces<E> few_places(const KeyRows<E>& rows, int64_t key, int64_t keys, const E** memory) {
  if (keys <= 0) return {memory, 0};
  rows.places().addresses(key, keys, memory);
  std::fill_n(memory + keys, kFewPad, memory[keys - 1]);
  return {memory, keys};
}

// Fetches a row of `dim` elements, LINES lines at a time: a loop over single lines costs more.
template <int LINES, class E>
QKV_INLINE void fetch_lines(const E* row, int64_t dim) {
  constexpr int kLine = int(kCacheLine / sizeof(E));
  for (int64_t d = 0; d < dim; d += LINES * kLine) {
    QKV_UNROLL
    for (int l = 0; l < LINES; ++l) __builtin_prefetch(row + d + l * kLine, 0, 2);
  }
}

// Rows of `dim` elements that are fetched while others are multiplied, evenly: `steps` calls of
// step() fetch them all.
//
// They come into the second-level cache, for which a core can have more requests open than for the
// first one: a cache in memory takes 0.7 of the time on two threads of a Zen 4, and 0.55 on one;
// one in the second-level cache as long. All of a row is fetched at once: a line of it between
// every few multiplications took 1.2 to 1.4 times as long (Zen 3). And where a page begins, one
// some pages ahead is looked up, as if rows lay one behind the other: with pages of 4 KiB, one
// thread of a virtual Zen 5 takes 0.8 to 0.95 of the time by it. Were the pages of the next block
// looked up by the addresses of its rows, a paged cache would take 0.92 of the time, but what is in
// a second-level cache 1.06.
//
// A CPU drops requests that find no room beside those that are open, and such lines are waited for
// when they are multiplied. So few are made at a time: of 192 lines at once, a Zen 5 drops 10 to 15
// %; and of rows of int8 that begin 64 bytes behind a page, requested four at a time, some 5 %, by
// which 4 queries take 18 ns a key of one thread instead of 10.
template <class E>
struct FewAhead {
  FewPlaces<E> places;
  int64_t dim;
  int64_t steps = 1, due = 0;

  QKV_INLINE void step() {
    for (due += places.count; due >= steps; due -= steps) fetch(*places.rows++);
  }

 private:
  QKV_INLINE void fetch(const E* row) const {
    const int64_t bytes = dim * int64_t(sizeof(E)), lines = bytes / int64_t(kCacheLine);
    if (int64_t(reinterpret_cast<uintptr_t>(row) % kPage) < bytes)
      touch_pages(row + kRowAhead / int64_t(sizeof(E)), 1);
    if (lines % 4 == 0) return fetch_lines<4>(row, dim);
    if (lines % 2 == 0) return fetch_lines<2>(row, dim);
    fetch_lines<1>(row, dim);
  }
};

// Which rows are fetched while others are multiplied: the next ones, and some of them twice.
template <class E>
class FewAsked {
 public:
  FewAsked(Arena& arena, const Problem& p)
      : memory_(p.pages.table && sizeof(E) > 1 && p.head_dim == p.head_dim_v &&
                        asks_ahead<float, E>(p, 0, kNearInputs)
                    ? arena.take<const E*>(2 * kFewStep)
                    : nullptr) {}

  // Returns what is fetched while `keys` rows `now` are multiplied: `next`.
  //
  // Rows in the pages of a paged cache (Problem::pages) that come from memory are asked for once
  // more, kAgain rows before they are multiplied: behind a page a CPU does not foresee what comes,
  // and waits for every line that was dropped. Pages of 16 rows of bf16 take 0.87 to 0.93 of the
  // time by it. Pages of int8 would take 1.1, rows of one tensor up to 1.6, and what is in a
  // second-level cache 1.1 (one and two threads of a Zen 5).
  FewPlaces<E> rows(FewPlaces<E> next, const E* const* now, int64_t keys) const {
    if (!memory_ || next.count > keys || keys < kAgain) return next;
    for (int64_t j = 0; j < next.count; ++j) {
      const int64_t again = j + kAgain;
      memory_[2 * j] = next.rows[j];
      memory_[2 * j + 1] = again < keys ? now[again] : next.rows[again - keys];
    }
    return {memory_, 2 * next.count};
  }

 private:
  static constexpr int64_t kAgain = 32;  // some 200 ns or more; 16 rows took up to 1.04 of the time

  const E** memory_;
};

}  // namespace qkv::QKV_ISA
