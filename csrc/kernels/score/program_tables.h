// Tables of score programs: how a tile reads their elements, and adds to their gradients.
#pragma once

#include "kernels/score/program_steps.h"

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

template <class T>
void load_reals(const T* table, const StepSize& size, const StepData& to, const StepData& at) {
  for (int64_t r = 0; r < size.rows; ++r)
    for (int64_t v = 0; v < size.vectors; ++v) {
      const IntVec<T> places = load_integers(at.at<T>(r, v));
      T* const numbers = to.at<T>(r, v);
      if (!table) {
        store(numbers, Vec<T>{});
      } else if (follow_each_other<T>(places)) {
        store(numbers, load(table + places[0]));
      } else {
        IntLane<T> all[kLanes<T>];
        std::memcpy(all, &places, sizeof all);
        read_elements<T>(table, all, std::numeric_limits<T>::quiet_NaN(), numbers);
      }
    }
}

template <class T>
void load_integers_of(const int32_t* table, const StepSize& size, const StepData& to,
                      const StepData& at) {
  for (int64_t r = 0; r < size.rows; ++r)
    for (int64_t v = 0; v < size.vectors; ++v) {
      IntLane<T> places[kLanes<T>], numbers[kLanes<T>];
      std::memcpy(places, at.at<T>(r, v), sizeof places);
      read_elements<T>(table, places, IntLane<T>(0), numbers);
      std::memcpy(to.at<T>(r, v), numbers, sizeof numbers);
    }
}

// sums[place] += value, for the values of `rows` rows and `vectors` vectors. Where places are the
// same in all rows, or in all lanes, values are added up first.
template <class T, class Sum>
class TableAdder {
 public:
  TableAdder(Sum* sums, int64_t rows, int64_t vectors, bool place_by_row, bool place_by_lane)
      : sums_(sums),
        rows_(rows),
        vectors_(vectors),
        place_by_row_(place_by_row),
        place_by_lane_(place_by_lane) {}

  void add(const StepData& place, const StepData& value) const {
    for (int64_t v = 0; v < vectors_; ++v) {
      Vec<T> sum{};
      for (int64_t r = 0; r < rows_; ++r) {
        sum += load(value.at<T>(r, v));
        if (!place_by_row_ && r + 1 < rows_) continue;
        add_vector(load_integers(place.at<T>(r, v)), sum);
        sum = Vec<T>{};
      }
    }
  }

 private:
  QKV_INLINE void add_vector(IntVec<T> places, Vec<T> values) const {
    if (!place_by_lane_) {
      Sum sum = 0;
      for (int l = 0; l < kLanes<T>; ++l) sum += values[l];
      if (places[0] >= 0) sums_[places[0]] += sum;
    } else if (follow_each_other<T>(places)) {
      for (int l = 0; l < kLanes<T>; ++l) sums_[places[0] + l] += values[l];
    } else {
      for (int l = 0; l < kLanes<T>; ++l)
        if (places[l] >= 0) sums_[places[l]] += values[l];
    }
  }

  Sum* sums_;
  int64_t rows_, vectors_;
  bool place_by_row_, place_by_lane_;
};

}  // namespace qkv::QKV_ISA
