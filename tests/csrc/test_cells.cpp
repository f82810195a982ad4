// The order of the backward pass over a plane (csrc/drivers/cells.h): however many bands of strips
// there are, every pair of a row and a key that sees it is in one rectangle, cells that can run at
// the same time share nothing, and each strip meets the others in the same order.
#include "drivers/cells.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "threads/parallel.h"

namespace qkv::test {
namespace {

Problem problem(int64_t L, int64_t S, int64_t group = 1, bool is_causal = false) {
  Problem p;
  p.seqlen_q = L, p.seqlen_k = S, p.heads = group, p.kv_heads = 1, p.is_causal = is_causal;
  return p;
}

std::vector<Problem> problems() {
  std::vector<Problem> all = {problem(1, 1),
                              problem(64, 5000),
                              problem(197, 197),
                              problem(390, 390, 1, true),
                              problem(2000, 257, 3),
                              problem(1000, 1300),
                              problem(700, 700, 4),
                              problem(1300, 500),
                              problem(900, 900, 1, true),
                              problem(513, 2000, 2, true),
                              problem(2000, 513, 2, true)};
  Problem window = problem(1500, 1500, 1, true);
  window.window_left = 200;
  all.push_back(window);
  window.is_causal = false, window.window_right = 90;
  all.push_back(window);
  return all;
}

// Blocks of rows and strips of keys of all parts, in the order in which they meet.
using Meetings = std::vector<std::pair<int64_t, int64_t>>;

// What a Grid asks of kernels, whose blocks of keys have 112 of them, or 64 where bits are fixed.
Kernels kernels(bool fixed_bits) {
  Kernels found{};
  found.fixed_bits = fixed_bits;
  found.key_step = fixed_bits ? [](int64_t) -> int64_t { return 64; }
                              : [](int64_t) -> int64_t { return 112; };
  return found;
}

struct Walk {
  const Problem p;
  const int64_t rows;
  const Grid grid;

  explicit Walk(const Problem& problem, bool ascending = false, bool whole_positions = false)
      : p(problem),
        rows(p.group() * p.seqlen_q),
        grid(p, rows, whole_positions, kernels(ascending)) {}

  // Calls f(cell, block, strip) for each meeting in which a row sees a key, cell after cell.
  template <class F>
  void for_each_meeting(int64_t bands, int64_t most_keys, const F& f) const {
    for (int64_t part = 0; part < grid.parts(); ++part)
      for (const Cell& cell : grid.cells(p, part, bands))
        grid.for_each_rectangle(p, cell, part, most_keys,
                                [&](const Rectangle& of) { for_each_of(cell, part, of, f); });
  }

  template <class F>
  void for_each_of(const Cell& cell, int64_t part, const Rectangle& of, const F& f) const {
    const int64_t step = grid.strips().keys, first = grid.keys(part, all()).begin;
    EXPECT_EQ(of.rows.begin % kGradRows, 0);
    EXPECT_EQ((of.keys.begin - first) % step, 0);
    for (int64_t row = of.rows.begin; row < of.rows.end; row += kGradRows)
      for (int64_t n = 0, strips = ceil_div(of.keys.end - of.keys.begin, step); n < strips; ++n) {
        const int64_t at = grid.strips().descends ? strips - 1 - n : n;
        const int64_t key = of.keys.begin + at * step;
        if (sees(row, key, std::min(of.keys.end, key + step)))
          f(cell, row / kGradRows, first + (key - first) / step * step);
      }
  }

  Range all() const { return {0, grid.strips().count}; }
  bool sees(int64_t row, int64_t key, int64_t key_end_) const {
    const int64_t last = std::min(rows, row + kGradRows) - 1;
    for (int64_t i = row / p.group(); i <= last / p.group(); ++i)
      if (std::max(key, key_begin(p, i)) < std::min(key_end_, key_end(p, i))) return true;
    return false;
  }
};

class Cells : public ::testing::TestWithParam<bool> {};

INSTANTIATE_TEST_SUITE_P(Order, Cells, ::testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "ascending" : "shifted");
});

// Several heads at one position are rows of one strip where that is asked for, and may be of two
// where it is not.
TEST(StripsOfRows, EndBetweenPositions) {
  for (int64_t group : {3, 5, 6, 7}) {
    const Problem p = problem(257, 512, group);
    const Walk walk(p, false, true), other(p);
    EXPECT_EQ(walk.grid.strips().rows % group, 0) << group;
    EXPECT_NE(other.grid.strips().rows % group, 0) << group;
    EXPECT_EQ(walk.grid.strips().rows % kGradRows, 0) << group;
    EXPECT_GT(walk.grid.width(), 1) << group;
  }
}

TEST_P(Cells, EachStripMeetsTheOthersOnceAndInOneOrder) {
  for (const Problem& p : problems()) {
    const Walk walk(p, GetParam(), p.group() > 1);
    SCOPED_TRACE(::testing::Message() << p.seqlen_q << " x " << p.seqlen_k);
    std::map<int64_t, Meetings> of_rows, of_keys;  // with one band
    for (int64_t bands : {1, 2, 3, 5, 8, 96}) {
      for (int64_t strips : {1, 3, 10000}) {
        const int64_t most_keys = strips * walk.grid.strips().keys;
        std::map<int64_t, Meetings> rows, keys;
        std::set<std::pair<int64_t, int64_t>> seen;
        walk.for_each_meeting(bands, most_keys, [&](const Cell&, int64_t block, int64_t strip) {
          EXPECT_TRUE(seen.emplace(block, strip).second) << block << " " << strip;
          rows[block].emplace_back(block, strip), keys[strip].emplace_back(block, strip);
        });
        if (of_rows.empty()) of_rows = rows, of_keys = keys;
        EXPECT_EQ(rows, of_rows) << bands;
        EXPECT_EQ(keys, of_keys) << bands;
      }
    }
    for (const auto* all : {&of_rows, &of_keys})
      for (const auto& [number, of] : *all)
        EXPECT_TRUE(!GetParam() || std::is_sorted(of.begin(), of.end())) << number;
    size_t meetings = 0, expected = 0;
    for (const auto& [block, of] : of_rows) meetings += of.size();
    for (int64_t row = 0; row < walk.rows; row += kGradRows)
      for (int64_t part = 0; part < walk.grid.parts(); ++part) {
        const Range keys = walk.grid.keys(part, walk.all());
        for (int64_t key = keys.begin; key < keys.end; key += walk.grid.strips().keys)
          expected += walk.sees(row, key, std::min(keys.end, key + walk.grid.strips().keys));
      }
    EXPECT_EQ(meetings, expected);
  }
}

// However many keys there are, work goes with those that a window shows to some row.
TEST_P(Cells, NoRectanglesOfKeysThatNoRowSees) {
  for (int64_t L : {1, 64, 1500}) {
    Problem p = problem(L, int64_t{1} << 30);
    p.window_left = 200, p.window_right = 90;
    const Walk walk(p);
    int64_t rectangles = 0, meetings = 0;
    for (int64_t part = 0; part < walk.grid.parts(); ++part)
      for (const Cell& cell : walk.grid.cells(walk.p, part, 1))
        walk.grid.for_each_rectangle(walk.p, cell, part, 256, [&](const Rectangle& of) {
          ++rectangles;
          meetings += of.keys.end - of.keys.begin;
        });
    EXPECT_GE(meetings, L + 200) << L;  // the window of the last row stands at the last key
    EXPECT_LE(rectangles, 2 * walk.grid.parts() * (L + 300) / 256 + 100) << L;
  }
}

// A cell in which no row sees a key is there only for a band of strips that has no other cell.
TEST_P(Cells, NoneThatSeesNothing) {
  for (const Problem& p : problems()) {
    const Walk walk(p);
    for (int64_t bands : {2, 3, 7, 96}) {
      for (int64_t part = 0; part < walk.grid.parts(); ++part)
        for (const Cell& cell : walk.grid.cells(walk.p, part, bands)) {
          int64_t meetings = 0;
          const auto count = [&](const Cell&, int64_t, int64_t) { ++meetings; };
          walk.grid.for_each_rectangle(walk.p, cell, part, 10000, [&](const Rectangle& of) {
            walk.for_each_of(cell, part, of, count);
          });
          EXPECT_TRUE(meetings || cell.row_cells == 1 || cell.key_cells == 1) << cell.step;
        }
    }
  }
}

// Cells of one step have neither rows nor keys in common, and ranks count the cells of a band.
TEST_P(Cells, StepsAndRanks) {
  for (const Problem& p : problems()) {
    const Walk walk(p);
    for (int64_t bands : {1, 2, 3, 7, 96}) {
      for (int64_t part = 0; part < walk.grid.parts(); ++part) {
        std::map<int32_t, std::set<int32_t>> rows_of_step, keys_of_step;
        std::map<int32_t, int32_t> cells_of_row, cells_of_key;
        int32_t step = -1;
        const std::vector<Cell> cells = walk.grid.cells(walk.p, part, bands);
        for (const Cell& cell : cells) {
          EXPECT_GE(cell.step, step);
          step = cell.step;
          EXPECT_TRUE(rows_of_step[step].insert(cell.row).second);
          EXPECT_TRUE(keys_of_step[step].insert(cell.key).second);
          EXPECT_EQ(cell.row_rank, cells_of_row[cell.row]++);
          EXPECT_EQ(cell.key_rank, cells_of_key[cell.key]++);
        }
        for (const Cell& cell : cells) {
          EXPECT_EQ(cell.row_cells, cells_of_row[cell.row]);
          EXPECT_EQ(cell.key_cells, cells_of_key[cell.key]);
        }
        EXPECT_LE(int64_t(cells_of_row.size()), std::max<int64_t>(1, walk.grid.most_bands()));
      }
    }
  }
}

// Where a rectangle ends its rows, none that follows in its cell has any of them.
TEST_P(Cells, RectanglesThatEndTheirRows) {
  for (const Problem& p : problems()) {
    const Walk walk(p);
    for (int64_t bands : {1, 3, 96}) {
      for (int64_t part = 0; part < walk.grid.parts(); ++part)
        for (const Cell& cell : walk.grid.cells(walk.p, part, bands)) {
          std::set<int64_t> ended;
          walk.grid.for_each_rectangle(
              walk.p, cell, part, 3 * walk.grid.strips().keys, [&](const Rectangle& of) {
                for (int64_t row = of.rows.begin; row < of.rows.end; row += kGradRows) {
                  EXPECT_EQ(ended.count(row), 0u);
                  if (of.ends_rows) ended.insert(row);
                }
              });
        }
    }
  }
}

// A strip with too many keys for a rectangle is taken in parts, one after the other, but for those
// that no row sees.
TEST_P(Cells, PartsOfAStrip) {
  for (const Problem& p : problems()) {
    const Walk walk(p);
    const int64_t most_keys = 48;
    for (int64_t part = 0; part < walk.grid.parts(); ++part)
      for (const Cell& cell : walk.grid.cells(walk.p, part, 3)) {
        std::vector<Rectangle> parts;
        walk.grid.for_each_rectangle(walk.p, cell, part, most_keys,
                                     [&](const Rectangle& of) { parts.push_back(of); });
        size_t at = 0;
        const int64_t whole = walk.grid.strips().keys;
        walk.grid.for_each_rectangle(walk.p, cell, part, whole, [&](const Rectangle& of) {
          const int64_t seen = key_begin(walk.p, of.rows.begin / walk.p.group());
          const int64_t last =
              std::min(of.keys.end, key_end(walk.p, (of.rows.end - 1) / walk.p.group()));
          for (int64_t begin = of.keys.begin; begin < last; begin += most_keys) {
            if (begin + most_keys <= seen) continue;
            ASSERT_LT(at, parts.size());
            EXPECT_EQ(parts[at].rows.begin, of.rows.begin);
            EXPECT_EQ(parts[at].rows.end, of.rows.end);
            EXPECT_EQ(parts[at].keys.begin, begin);
            EXPECT_EQ(parts[at].keys.end, std::min(begin + most_keys, of.keys.end));
            EXPECT_EQ(parts[at].ends_rows, of.ends_rows && parts[at].keys.end >= last);
            ++at;
          }
        });
        EXPECT_EQ(at, parts.size());
      }
  }
}

}  // namespace
}  // namespace qkv::test
