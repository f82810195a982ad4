// In which order the backward pass of a plane takes its rows and its keys.
//
// Both are cut into n strips. A strip of rows that meets a strip of keys adds to the sums of both,
// so two meetings that have a strip in common must not happen at the same time; and so that sums
// have the same bits whoever makes them, every strip meets those of the other kind in an order that
// follows from the shape alone. Strip r of the rows and strip s of the keys meet at step
// (r + s + 1) mod n, which is another one for each s (docs/report.md, "Many cores", has the table).
// At each step there are n meetings; where is_causal hides those with s > r, n / 2 of them or one
// more; and where a window leaves some diagonals, n on each of these, if the strips of keys are
// numbered from the last one on. (All orders of a fixed sum have the bound n: DASH, arXiv
// 2601.21824, calls its own shift scheduling.)
//
// The meetings of a strip have two laps: one from step 0 on, those with r + s + 1 >= n, and one
// that ends with step n - 1. Within a lap, steps ascend with r and with s. So whoever takes many
// strips of rows and many of keys at once, first what belongs to the first lap and then what
// belongs to the second, may go through each lap row by row or key by key: every strip meets the
// others in the same order. One lap of such a rectangle is a cell, and a plane is cut into as many
// as there is use for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/visible.h"
#include "dispatch/kernel_table.h"
#include "threads/parallel.h"

namespace qkv {

// The fewest keys of a strip, and what its keys are a multiple of where the plane is not short.
// Where every strip is an item, each block of rows is packed once for it, which takes a tenth of
// the time of 64 keys (Zen 3, D = 64).
constexpr int64_t kStripKeys = 64;

// The size of a strip of `total` rows or keys, a multiple of `unit`, if there are to be at most
// `count` of them.
inline int64_t strip_size(int64_t total, int64_t count, int64_t unit) {
  return std::max(unit, ceil_div(ceil_div(total, count), unit) * unit);
}

// How the rows of a plane and one part of its keys are cut. Where there are more strips of one kind
// than of the other, the last ones of the other are empty.
struct Strips {
  int64_t count = 1;                   // n
  int64_t rows = kGradRows, keys = 1;  // of a strip; all but the last have so many
  bool descends = false;               // whether strips of keys are numbered from the last one on
};

struct Cell {
  Range rows, keys;  // numbers of strips
  bool second_lap;
  // Which band of strips of rows, and of keys, the cell has.
  int32_t row = 0, key = 0;
  int32_t step = 0;  // cells of the same step have no band in common
  // How many cells of its bands come before it, and how many there are.
  int32_t row_rank = 0, key_rank = 0;
  int32_t row_cells = 0, key_cells = 0;
};

// Rows and keys of a plane: those of some strips of one lap.
struct Rectangle {
  Range rows, keys;
  bool ends_rows;  // whether these rows meet no other keys of the cell after these
};

// The strips of one plane, and the parts of its keys: where rows are few and keys many, each part
// of the keys has strips of its own, and its own sum for grad_query.
class Grid {
 public:
  // `item` is the problem of any batch item of the stretch. `whole_positions`: strips of rows end
  // between two queries' positions, so that the heads of a group that are at one position are rows
  // of one strip.
  Grid(const Problem& item, int64_t rows, bool whole_positions, const Kernels& kernels);

  int64_t parts() const { return parts_; }
  const Strips& strips() const { return strips_; }
  // Whether the plane has so few keys that packing its rows twice would show: one thread takes
  // them in one lap, and in one call of the kernel.
  bool is_short() const { return total_keys_ < kShortKeys; }
  // The most threads that can work on the plane at the same time.
  int64_t width() const;
  // Into how many bands of equally many strips the strips can be cut, at most.
  int64_t most_bands() const { return strips_.count; }
  // The cells of one part, of which there are none without rows or keys that see each other, but
  // for one of each band at least; in an order in which they can run one after the other.
  std::vector<Cell> cells(const Problem& item, int64_t part, int64_t bands) const;

  Range rows(const Range& strips) const;
  Range keys(int64_t part, const Range& strips) const;

  // Calls f(Rectangle) for rectangles that together are a cell, each of at most `most_keys` keys,
  // in an order in which they can run. Keys are whole strips, or parts of one strip with more of
  // them. Left out is what no row sees: there may be any number of such keys.
  template <class F>
  void for_each_rectangle(const Problem& item, const Cell& cell, int64_t part, int64_t most_keys,
                          const F& f) const {
    const int64_t n = strips_.count, most = std::max<int64_t>(1, most_keys / strips_.keys);
    const auto run = [&](int64_t row, int64_t row_end, int64_t key, int64_t key_end,
                         bool ends_rows) {
      const Range its_rows = rows({row, row_end}), its_keys = keys(part, {key, key_end});
      if (its_rows.is_empty()) return;
      const int64_t seen = qkv::key_begin(item, its_rows.begin / item.group());
      const int64_t seen_end = qkv::key_end(item, (its_rows.end - 1) / item.group());
      const int64_t skipped = std::max<int64_t>(0, seen - its_keys.begin) / most_keys * most_keys;
      const int64_t last = std::min(its_keys.end, seen_end);
      for (int64_t begin = its_keys.begin + skipped; begin < last; begin += most_keys) {
        const int64_t end = std::min(its_keys.end, begin + most_keys);
        f({its_rows, {begin, end}, ends_rows && end >= last});
      }
    };
    for (int64_t key = cell.keys.begin; key < cell.keys.end; key += most) {
      const int64_t end = std::min(cell.keys.end, key + most);
      const bool ends = end == cell.keys.end;
      // Of strips [key, end), strip r of the rows meets in the first lap those from n - 1 - r on:
      // the last one from r = n - end on, and all from r = n - 1 - key on.
      // Of one lap, all rows meet all keys.
      const int64_t last = cell.rows.end;
      const int64_t some = ascending_ ? last : std::clamp(n - end, cell.rows.begin, last);
      const int64_t all = ascending_ ? last : std::clamp(n - 1 - key, cell.rows.begin, last);
      if (cell.second_lap) run(cell.rows.begin, some, key, end, ends);
      for (int64_t r = some; r < all; ++r)
        cell.second_lap ? run(r, r + 1, key, n - 1 - r, true) : run(r, r + 1, n - 1 - r, end, ends);
      if (!cell.second_lap) run(all, cell.rows.end, key, end, ends);
    }
  }

 private:
  // The fewest keys of a plane that is not short.
  static constexpr int64_t kShortKeys = 400;

  // The cells of a plane in which every row sees every key.
  std::vector<Cell> candidates(int64_t bands) const;
  bool sees(const Problem& item, const Cell& cell, int64_t part) const;

  int64_t total_rows_, total_keys_;
  bool ascending_;  // every strip meets those of the other kind in their order, in one lap
  Strips strips_;
  int64_t parts_ = 1, part_keys_ = 0;
};

}  // namespace qkv
