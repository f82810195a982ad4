// Lines: places in a table that grow by the same number from key to key (program::Step::line). What
// is read there needs no places, and no check of any: those of the first and the last key of a tile
// tell all others. Where neighbouring lanes are neighbouring elements, as in table[q - k], the
// elements are not even copied.
#pragma once

#include "kernels/operands/tile.h"
#include "kernels/score/program_steps.h"

namespace qkv::QKV_ISA {

template <class T>
struct Line {
  IntVec<T> first[2];  // the places of the tile's first key
  int64_t per_key;
  // Whether the lanes that have a row follow each other, and the largest place there is if all
  // lanes do. That may be outside of the table, and of all of them.
  bool follows;
  int64_t most;

  QKV_INLINE IntVec<T> places(int64_t row, int64_t vector) const {
    return first[vector] + IntLane<T>(row * per_key);
  }
  // Where they are from row `row` on, if all lanes follow each other.
  StepData elements(const T* table, int64_t row) const {
    const T* const at = table + first[0][0] + row * per_key;
    return {const_cast<char*>(reinterpret_cast<const char*>(at)), per_key * int64_t(sizeof(T)),
            kVectorBytes};
  }
};

// Takes down the places of a key of the tile, of which the first is row 0. False: one is outside,
// or they do not grow evenly from the first key's on.
template <class T>
bool extend_line(Line<T>& line, const StepData& at, int64_t row, int64_t vectors) {
  IntVec<T> differs{};
  for (int64_t v = 0; v < vectors; ++v) {
    const IntVec<T> places = load_integers(at.at<T>(0, v));
    if (row == 0) line.first[v] = places;
    differs |= (places < 0) | (places != line.places(row, v));
  }
  return !or_lanes((IntVec<double>)differs);
}

// Sets follows and most of a line over `keys` keys.
template <class T>
void finish_line(Line<T>& line, const Tile& tile, int64_t keys) {
  const int64_t first = line.first[0][0];
  line.follows = true;
  for (int l = 0; l < tile.rows; ++l)
    line.follows &= line.first[l / kLanes<T>][l % kLanes<T>] == first + l;
  line.most = first + tile.lanes - 1 + std::max<int64_t>(0, (keys - 1) * line.per_key);
}

// to = the elements of a line, from row `row` of the tile on, lane by lane.
template <class T>
void load_line(const T* table, const Line<T>& line, int64_t row, const StepSize& size,
               StepData to) {
  for_each_vector(size, [&](int64_t r, int64_t v) QKV_INLINE_LAMBDA {
    IntLane<T> places[kLanes<T>];
    const IntVec<T> all = line.places(row + r, v);
    std::memcpy(places, &all, sizeof places);
    for (int l = 0; l < kLanes<T>; ++l) to.at<T>(r, v)[l] = table[places[l]];
  });
}

}  // namespace qkv::QKV_ISA
