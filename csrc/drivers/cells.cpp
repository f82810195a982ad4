#include "cells.h"

#include <numeric>

namespace qkv {
namespace {

// The strips of all planes of a batch item are enough for about so many threads, if they have
// kStripKeys keys each: is_causal hides half of the meetings of a step.
constexpr int64_t kWantedWidth = 128;
// To take a plane in two laps, a thread packs its rows twice, which shows where it would pack them
// once otherwise. So short planes are taken in one lap of so many strips of rows, and of keys as
// many as kernels make blocks of: that costs one thread nothing, and there is work for some more.
constexpr int64_t kShortRowStrips = 4;
// Where there are fewer blocks of rows than kWantedParts, keys are cut into parts of about
// kPartKeys keys, so that about as many threads find work.
constexpr int64_t kWantedParts = 8;
constexpr int64_t kPartKeys = 256;

}  // namespace

Grid::Grid(const Problem& p, int64_t rows, bool whole_positions, const Kernels& kernels)
    : total_rows_(rows), total_keys_(p.seqlen_k), ascending_(kernels.fixed_bits || is_short()) {
  const int64_t blocks = std::max<int64_t>(1, ceil_div(rows, kGradRows));
  if (blocks < kWantedParts && !ascending_)
    parts_ =
        std::clamp<int64_t>((p.seqlen_k + kPartKeys / 2) / kPartKeys, 1, kWantedParts / blocks);
  part_keys_ = std::max<int64_t>(1, ceil_div(p.seqlen_k, parts_));
  parts_ = std::max<int64_t>(1, ceil_div(p.seqlen_k, part_keys_));
  int64_t wanted = ceil_div(kWantedWidth << p.is_causal, std::max<int64_t>(1, p.kv_heads));
  const int64_t unit = whole_positions ? std::lcm(kGradRows, p.group()) : kGradRows;
  wanted = std::min({wanted, ceil_div(rows, unit), part_keys_ / kStripKeys});
  const int64_t block = kernels.key_step(p.seqlen_k);
  if (is_short()) wanted = 1;
  if (is_short() && block < p.seqlen_k && rows > unit) {
    strips_.keys = block;
    strips_.rows = strip_size(rows, kShortRowStrips, unit);
  } else if (wanted <= 1) {
    strips_.keys = part_keys_, strips_.rows = blocks * kGradRows;
  } else {
    strips_.keys = strip_size(part_keys_, wanted, kStripKeys);
    strips_.rows = strip_size(rows, wanted, unit);
  }
  strips_.count =
      std::max({int64_t{1}, ceil_div(part_keys_, strips_.keys), ceil_div(rows, strips_.rows)});
  strips_.descends = p.window_left >= 0 && !ascending_;
}

int64_t Grid::width() const {
  const int64_t rows = std::max<int64_t>(1, ceil_div(total_rows_, strips_.rows));
  const int64_t keys = std::max<int64_t>(1, ceil_div(part_keys_, strips_.keys));
  return parts_ * std::min(rows, keys);
}

Range Grid::rows(const Range& strips) const {
  return {std::min(total_rows_, strips.begin * strips_.rows),
          std::min(total_rows_, strips.end * strips_.rows)};
}

Range Grid::keys(int64_t part, const Range& strips) const {
  const Range natural =
      strips_.descends ? Range{strips_.count - strips.end, strips_.count - strips.begin} : strips;
  const int64_t first = part * part_keys_, end = std::min(total_keys_, first + part_keys_);
  return {std::min(end, first + natural.begin * strips_.keys),
          std::min(end, first + natural.end * strips_.keys)};
}

// Whether any pair of the cell is visible.
bool Grid::sees(const Problem& p, const Cell& cell, int64_t part) const {
  bool found = false;
  for_each_rectangle(p, cell, part, total_keys_ + strips_.keys, [&](const Rectangle& of) {
    found |= std::max(of.rows.begin, grad_row_begin(p, of.keys.begin)) <
             std::min(of.rows.end, grad_row_end(p, of.keys.end));
  });
  return found;
}

std::vector<Cell> Grid::candidates(int64_t bands) const {
  const int64_t n = strips_.count, strips = ceil_div(n, bands);
  bands = ceil_div(n, strips);
  // Of cells that could begin, those of which more others wait go first: on 64 cores 0.848 of their
  // time is used for vit-s, counted, and 0.811 where all cells with the same row + key are alike.
  const auto band = [&](int64_t i) { return Range{i * strips, std::min(n, (i + 1) * strips)}; };
  std::vector<Cell> found;
  for (int64_t row = 0; row < bands; ++row) {
    for (int64_t key = 0; key < bands; ++key) {
      const Range rows = band(row), keys = band(key);
      const int64_t step = (is_short() ? 2 * row + 3 * key : row + key) + 1;
      if (!ascending_ && rows.end + keys.end - 1 >= n)
        found.push_back({rows, keys, false, int32_t(row), int32_t(key), int32_t(step - bands)});
      if (ascending_ || rows.begin + keys.begin + 1 < n)
        found.push_back({rows, keys, true, int32_t(row), int32_t(key), int32_t(step)});
    }
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Cell& a, const Cell& b) { return a.step < b.step; });
  return found;
}

std::vector<Cell> Grid::cells(const Problem& item, int64_t part, int64_t bands) const {
  const std::vector<Cell> all = candidates(bands);
  std::vector<char> kept(all.size()), has_row(strips_.count), has_key(strips_.count);
  const auto keep = [&](size_t i) { kept[i] = has_row[all[i].row] = has_key[all[i].key] = true; };
  for (size_t i = 0; i < all.size(); ++i)
    if (sees(item, all[i], part)) keep(i);
  for (size_t i = 0; i < all.size(); ++i) {
    const Cell& cell = all[i];
    if ((!has_row[cell.row] && !rows(cell.rows).is_empty()) ||
        (!has_key[cell.key] && !keys(part, cell.keys).is_empty()))
      keep(i);
  }
  std::vector<int32_t> of_row(strips_.count), of_key(strips_.count);
  std::vector<Cell> found;
  for (size_t i = 0; i < all.size(); ++i) {
    if (!kept[i]) continue;
    Cell cell = all[i];
    cell.row_rank = of_row[cell.row]++;
    cell.key_rank = of_key[cell.key]++;
    found.push_back(cell);
  }
  for (Cell& cell : found) cell.row_cells = of_row[cell.row], cell.key_cells = of_key[cell.key];
  return found;
}

}  // namespace qkv
