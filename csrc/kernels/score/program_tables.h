// Tables of score programs: how a tile reads their elements, and adds to their gradients.
#pragma once

#include "kernels/score/program_lines.h"

namespace qkv::QKV_ISA {

// Whether the places of a vector follow each other, none of them being outside.
template <class T>
QKV_INLINE bool follow_each_other(IntVec<T> places) {
  IntVec<T> expected;
  for (int l = 0; l < kLanes<T>; ++l) expected[l] = IntLane<T>(l);
  expected += places[0];
  return places[0] >= 0 && !or_lanes((IntVec<double>)(places != expected));
}

// Elements of a table at these places; at program::kOutside `none`.
template <class T, class Element, class Lane>
QKV_INLINE void read_elements(const Element* table, const IntLane<T>* places, Lane none, Lane* to) {
  for (int l = 0; l < kLanes<T>; ++l) to[l] = places[l] < 0 ? none : Lane(table[places[l]]);
}

// The same, of places that are the same in all lanes.
template <class T, class Lane, class Element>
void read_by_row(const Element* table, const StepSize& size, StepData to, StepData at, Lane none) {
  for (int64_t r = 0; r < size.rows; ++r) {
    const IntLane<T> place = *at.at<IntLane<T>>(r, 0);
    const Lane number = place < 0 ? none : Lane(table[place]);
    for (int l = 0; l < kLanes<T>; ++l) to.at<Lane>(r, 0)[l] = number;
  }
}

template <class T>
void load_reals(const T* table, const StepSize& size, StepData to, StepData at) {
  constexpr T kNone = std::numeric_limits<T>::quiet_NaN();
  if (table && !size.by_lane) return read_by_row<T>(table, size, to, at, kNone);
  for_each_vector(size, [&](int64_t r, int64_t v) QKV_INLINE_LAMBDA {
    const IntVec<T> places = load_integers(at.at<T>(r, v));
    T* const numbers = to.at<T>(r, v);
    if (!table) {
      store(numbers, Vec<T>{});
    } else if (follow_each_other<T>(places)) {
      store(numbers, load(table + places[0]));
    } else {
      IntLane<T> all[kLanes<T>];
      std::memcpy(all, &places, sizeof all);
      read_elements<T>(table, all, kNone, numbers);
    }
  });
}

template <class T>
void load_integers_of(const int32_t* table, const StepSize& size, StepData to, StepData at) {
  if (!size.by_lane) return read_by_row<T>(table, size, to, at, IntLane<T>(0));
  for_each_vector(size, [&](int64_t r, int64_t v) QKV_INLINE_LAMBDA {
    IntLane<T> places[kLanes<T>], numbers[kLanes<T>];
    std::memcpy(places, at.at<T>(r, v), sizeof places);
    read_elements<T>(table, places, IntLane<T>(0), numbers);
    std::memcpy(to.at<T>(r, v), numbers, sizeof numbers);
  });
}

// Lane 0 + lane 1 + ..., in double.
template <int h = kLanes<double> / 2>
QKV_INLINE double add_lanes_of(Vec<double> x) {
  if constexpr (h > 0) return add_lanes_of<h / 2>(x + shuffle(x, x, [](int l) { return l ^ h; }));
  return x[0];
}
template <class T>
QKV_INLINE double add_lanes(Vec<T> values) {
  alignas(kVectorBytes) T all[kLanes<T>];
  store(all, values);
  Vec<double> sum{};
  for (int l = 0; l < kLanes<T>; l += kLanes<double>) sum += load_double(all + l);
  return add_lanes_of(sum);
}

// sums[place] += value, for the values of `rows` rows and `vectors` vectors. Where places are the
// same in all rows, or in all lanes, values are added up first.
template <class T, class Sum>
struct TableAdder {
  Sum* sums;
  int64_t rows, vectors;
  bool place_by_row, place_by_lane;

  // At the places of a line, from row `row` of the tile on.
  void add_line(const Line<T>& line, bool follows, int64_t row, StepData value) const {
    for_each_vector({rows, vectors, true}, [&](int64_t r, int64_t v) QKV_INLINE_LAMBDA {
      const T* const values = value.at<T>(r, v);
      const IntVec<T> places = line.places(row + r, v);
      if (follows)
        add_elements(sums + line.first[0][0] + (row + r) * line.per_key + v * kLanes<T>, values);
      else
        for (int l = 0; l < kLanes<T>; ++l) sums[places[l]] += values[l];
    });
  }

  void add(StepData place, StepData value) const {
    for (int64_t v = 0; v < (place_by_lane ? vectors : 1); ++v) {
      Vec<T> sum{};
      for (int64_t r = 0; r < rows; ++r) {
        sum += load(value.at<T>(r, v));
        if (!place_by_lane && vectors > 1) sum += load(value.at<T>(r, 1));
        if (!place_by_row && r + 1 < rows) continue;
        add_vector(load_integers(place.at<T>(r, v)), sum);
        sum = Vec<T>{};
      }
    }
  }

 private:
  // sums [lanes] += values [lanes].
  QKV_INLINE static void add_elements(Sum* sums, const T* values) {
    for (int l = 0; l < kLanes<T>; l += kLanes<Sum>) {
      if constexpr (sizeof(Sum) == sizeof(T))
        store(sums + l, load(sums + l) + load(values + l));
      else
        store(sums + l, load(sums + l) + load_double(values + l));
    }
  }
  QKV_INLINE void add_vector(IntVec<T> places, Vec<T> values) const {
    if (!place_by_lane) {
      if (places[0] >= 0) sums[places[0]] += Sum(add_lanes<T>(values));
    } else if (follow_each_other<T>(places)) {
      alignas(kVectorBytes) T all[kLanes<T>];
      store(all, values);
      add_elements(sums + places[0], all);
    } else {
      for (int l = 0; l < kLanes<T>; ++l)
        if (places[l] >= 0) sums[places[l]] += values[l];
    }
  }
};

}  // namespace qkv::QKV_ISA
