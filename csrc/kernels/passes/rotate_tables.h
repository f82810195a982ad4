// The tables and weights of a rotation (rotation.h), in the compute type.
#pragma once

#include "kernels/passes/rotate_rows.h"

namespace qkv::QKV_ISA {

// cos and sin of the positions of an item, and the weights, in the compute type. For the backward
// pass, sin is negated: the gradient of what was turned by an angle is turned back by it.
template <class T>
struct RotationTables {
  const RowRuns<T> runs;
  // [positions, runs.pairs]. Interleaved, every number twice, and sin's first one negated.
  T *const cos, *const sin;
  std::array<T*, 2> weights;  // [runs.width]; null: there is no norm

  RotationTables(const Rotation& r, const RotationItem& item, Arena& arena)
      : runs(r),
        cos(arena.take<T>(kRotationBlock * runs.pairs)),
        sin(arena.take<T>(kRotationBlock * runs.pairs)),
        positions_(item.end - item.begin) {
    for (T*& weight : weights) weight = arena.take<T>(runs.width);
    if (arena.counting()) return;
    fill(r, item, r.cos, cos, 1);
    fill(r, item, r.sin, sin, r.is_interleaved ? -1 : 1);
    for (int64_t i = 0; item.gradients && i < positions_ * runs.pairs; i += kLanes<T>)
      store(sin + i, -load(sin + i));
    for (int t = 0; t < 2; ++t) {
      const TypedInput& weight = r.tensors[t].weight;
      if (!weight.data) {
        weights[t] = nullptr;
        continue;
      }
      with_elements(weight, batch_offset(r, weight.strides, item.batch),
                    [&](const auto* from) { runs.gather(from, weight.strides.col, weights[t]); });
    }
  }

  // Brings the tables and the weight of a tensor into the order in which load_vectors has the rows
  // of type S. They begin in that of T.
  template <class S>
  void arrange_for(int tensor) {
    const auto change = [&](T* row, int64_t from, int64_t to) QKV_INLINE_LAMBDA {
      for (; from + 2 * kLanes<T> <= to; from += 2 * kLanes<T>)
        kInParts<S> ? to_parts<BFloat16, T>(row + from) : from_parts<BFloat16, T>(row + from);
    };
    if constexpr (kInParts<S>)
      if (weights[tensor]) {
        change(weights[tensor], 0, runs.pairs);
        change(weights[tensor], runs.pairs, runs.rest);
        change(weights[tensor], runs.rest, runs.width);
      }
    if (in_parts_ == kInParts<S>) return;
    in_parts_ = kInParts<S>;
    for (T* table : {cos, sin})
      for (int64_t p = 0; p < positions_; ++p) change(table, p * runs.pairs, (p + 1) * runs.pairs);
  }

 private:
  const int64_t positions_;
  bool in_parts_ = false;

  template <class F>
  static void with_elements(const TypedInput& input, int64_t offset, const F& f) {
    with_type(input.dtype,
              [&](auto element) { f(static_cast<const decltype(element)*>(input.data) + offset); });
  }

  void fill(const Rotation& r, const RotationItem& item, const TypedInput& from, T* to,
            T of_first) const {
    const int64_t first = item.begin + (r.offsets ? r.offsets[item.batch] : 0);
    const int64_t offset = batch_offset(r, from.strides, item.batch) + first * from.strides.row;
    with_elements(from, offset, [&](const auto* row) {
      constexpr bool kIsHere = std::is_same_v<decltype(load_wide(row)), Vec<T>>;
      const int64_t pairs = r.rotary_pairs, column = from.strides.col, padded = runs.pairs;
      const int64_t in_vectors =
          kIsHere && !r.is_interleaved && column == 1 ? pairs / kLanes<T> * kLanes<T> : 0;
      for (int64_t n = item.end - item.begin; n > 0; --n, row += from.strides.row, to += padded) {
        int64_t i = 0;
        if constexpr (kIsHere)
          for (; i < in_vectors; i += kLanes<T>) store(to + i, load_wide(row + i));
        for (; i < pairs; ++i) {
          const T x = T(widen(row[i * column]));
          if (r.is_interleaved)
            to[2 * i] = of_first * x, to[2 * i + 1] = x;
          else
            to[i] = x;
        }
        for (i = runs.runs[0].count; i < padded; ++i) to[i] = 0;
      }
    });
  }
};

}  // namespace qkv::QKV_ISA
