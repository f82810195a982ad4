// What both passes of a rotation (rotation.h) share: how rows lie in vectors, the tables of an item
// in the compute type, and the groups in which rows are taken.
#pragma once

#include "kernels/simd/halves.h"
#include "kernels/simd/transpose.h"

namespace qkv::QKV_ISA {

// Rounds and stores. Where there is an instruction for bf16, it takes subnormal numbers for zeros.
template <class E>
QKV_INLINE void store_rounded(E* p, Vec<Compute<E>> x) {
#if defined(QKV_PAIRS)
  if constexpr (std::is_same_v<E, BFloat16>) {
    const auto narrow = native_narrow(x, x);
    std::memcpy(p, &narrow, kVectorBytes / 2);
    return;
  }
#endif
  store_narrow(p, x);
}

// The numbers of a row are up to three runs: the first numbers of all pairs, the second ones, and
// what is not rotated; interleaved, the pairs are one run. In vectors each run begins with a vector
// and is followed by zeros.
template <class T>
struct RowRuns {
  struct Run {
    int64_t from, to, count;  // where it begins in memory and in vectors
  };
  Run runs[3];
  int64_t pairs;  // of the first run, in vectors
  int64_t rest;   // where the last run begins
  int64_t width;  // of all of them
  bool is_dense;  // there are no zeros

  explicit RowRuns(const Rotation& r) {
    const auto padded = [](int64_t n) { return (n + kLanes<T> - 1) / kLanes<T> * kLanes<T>; };
    const int64_t first = r.is_interleaved ? 2 * r.rotary_pairs : r.rotary_pairs;
    const int64_t second = r.is_interleaved ? 0 : first, rotated = first + second;
    pairs = padded(first), rest = pairs + padded(second);
    runs[0] = {0, 0, first}, runs[1] = {first, pairs, second};
    runs[2] = {rotated, rest, r.head_dim - rotated};
    width = rest + padded(runs[2].count);
    is_dense = width == r.head_dim;
  }

  // A row from memory to vectors, and back.
  template <class E>
  void gather(const E* from, int64_t stride, T* to) const {
    for (const Run& run : runs) {
      int64_t i = 0;
      if constexpr (std::is_same_v<Compute<E>, T>)
        for (; stride == 1 && i + kLanes<T> <= run.count; i += kLanes<T>)
          store(to + run.to + i, load_wide(from + run.from + i));
      for (; i < run.count; ++i) to[run.to + i] = T(widen(from[(run.from + i) * stride]));
      for (; i % kLanes<T> != 0; ++i) to[run.to + i] = 0;
    }
  }
  template <class E>
  void scatter(const T* from, E* to, int64_t stride) const {
    for (const Run& run : runs) {
      int64_t i = 0;
      for (; stride == 1 && i + kLanes<T> <= run.count; i += kLanes<T>)
        store_rounded(to + run.from + i, load(from + run.to + i));
      for (; i < run.count; ++i) to[(run.from + i) * stride] = narrow<E>(from[run.to + i]);
    }
  }
};

// Neighbours of each other: the numbers of a pair that are one run.
template <class V>
QKV_INLINE V swap_neighbours(V x) {
  return shuffle(x, x, [](int l) { return l ^ 1; });
}

// Rows that go through a pass together: as many as a vector has lanes, so that what each row has
// one number of is a vector.
template <class T>
struct RowGroup {
  int count = 0;
  int64_t head[kLanes<T>], position[kLanes<T>];
};

// Calls f(group) until all rows were in one: `heads` heads of `positions` positions, in the order
// in which they lie in memory.
template <class T, class F>
void for_each_group(int64_t heads, int64_t positions, const Strides& strides, const F& f) {
  const bool heads_first = strides.row > strides.head;  // the heads of a position are neighbours
  const int64_t outer = heads_first ? positions : heads, inner = heads_first ? heads : positions;
  RowGroup<T> group;
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t i = 0; i < inner; ++i) {
      group.head[group.count] = heads_first ? i : o;
      group.position[group.count] = heads_first ? o : i;
      if (++group.count < kLanes<T>) continue;
      f(group);
      group.count = 0;
    }
  }
  if (group.count > 0) f(group);
}

// cos and sin of the positions of an item, and the weights, in the compute type.
template <class T>
struct RotationTables {
  const RowRuns<T> runs;
  // [positions, runs.pairs]. Interleaved, every number twice, and sin's first one negated.
  T *const cos, *const sin;
  std::array<T*, 2> weights;  // [runs.width]; null: there is no norm

  RotationTables(const Rotation& r, const RotationItem& item, Arena& arena)
      : runs(r),
        cos(arena.take<T>(kRotationBlock * runs.pairs)),
        sin(arena.take<T>(kRotationBlock * runs.pairs)) {
    for (T*& weight : weights) weight = arena.take<T>(runs.width);
    if (arena.counting()) return;
    fill(r, item, r.cos, cos, 1);
    fill(r, item, r.sin, sin, r.is_interleaved ? -1 : 1);
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

 private:
  template <class F>
  static void with_elements(const TypedInput& input, int64_t offset, const F& f) {
    if (input.dtype == DType::f32) return f(static_cast<const float*>(input.data) + offset);
    if (input.dtype == DType::f64) return f(static_cast<const double*>(input.data) + offset);
    if (input.dtype == DType::bf16) return f(static_cast<const BFloat16*>(input.data) + offset);
    f(static_cast<const Float16*>(input.data) + offset);
  }

  void fill(const Rotation& r, const RotationItem& item, const TypedInput& from, T* to,
            T of_first) const {
    const int64_t first = item.begin + (r.offsets ? r.offsets[item.batch] : 0);
    const int64_t offset = batch_offset(r, from.strides, item.batch) + first * from.strides.row;
    with_elements(from, offset, [&](const auto* row) {
      for (int64_t n = item.end - item.begin; n > 0; --n, row += from.strides.row) {
        for (int64_t i = 0; i < r.rotary_pairs; ++i) {
          const T x = T(widen(row[i * from.strides.col]));
          if (r.is_interleaved)
            to[2 * i] = of_first * x, to[2 * i + 1] = x;
          else
            to[i] = x;
        }
        for (int64_t i = runs.runs[0].count; i < runs.pairs; ++i) to[i] = 0;
        to += runs.pairs;
      }
    });
  }
};

// One of the tensors of an item: where its rows begin.
template <class E, class Tensor>
auto rows_of(const Rotation& r, const Tensor& tensor, const RotationItem& item) {
  using Element = std::conditional_t<std::is_same_v<Tensor, Input>, const E, E>;
  return static_cast<Element*>(tensor.data) + batch_offset(r, tensor.strides, item.batch) +
         item.begin * tensor.strides.row;
}

// Where the rows of a group begin.
template <class Element, class T>
void locate(const RowGroup<T>& group, Element* rows, const Strides& strides, Element** at) {
  for (int g = 0; g < group.count; ++g)
    at[g] = rows + group.head[g] * strides.head + group.position[g] * strides.row;
}

inline float square_root(float x) { return __builtin_sqrtf(x); }
inline double square_root(double x) { return __builtin_sqrt(x); }

// 1 / sqrt(mean + eps) of each row, from the vectors of which its lanes add up to its sum of
// squares. Overwrites them.
template <class T>
QKV_INLINE Vec<T> inverse_norms(Vec<T>* squares, T inverse_dim, T eps) {
  T roots[kLanes<T>];
  store(roots, sum_lanes<T>(squares) * inverse_dim + eps);
  for (T& root : roots) root = square_root(root);  // one instruction, of vectors
  return 1 / load(roots);
}

}  // namespace qkv::QKV_ISA
