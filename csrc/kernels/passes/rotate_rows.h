// What both passes of a rotation (rotation.h) share: how rows lie in vectors, and the groups in
// which they are taken.
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

// n vectors at p: one, or two in the order of load_part. Of bf16, these are cheaper to widen and to
// round than two as they lie in memory.
template <int n, class E>
QKV_INLINE void load_vectors(const E* p, Vec<Compute<E>>* to) {
  to[0] = load_part<n == 2 ? 0 : -1>(p);
  if constexpr (n == 2) to[1] = load_part<1>(p);
}
template <int n, class E>
QKV_INLINE void store_vectors(E* p, const Vec<Compute<E>>* x) {
  if constexpr (n == 2 && kInParts<E>) {
#if defined(QKV_PAIRS)
    typedef uint16_t Halves __attribute__((vector_size(kVectorBytes)));
    const Halves halves = (Halves)native_narrow(x[0], x[1]);
    constexpr int W = kLanes<float>;
    const Halves pairs = shuffle(halves, halves, [](int l) { return l / 2 + l % 2 * W; });
#else
    const HalfBits pairs = rounded_bits(x[0]) >> 16 | (rounded_bits(x[1]) & 0xffff0000u);
#endif
    std::memcpy(p, &pairs, sizeof pairs);
  } else {
    for (int h = 0; h < n; ++h) store_rounded(p + h * kLanes<Compute<E>>, x[h]);
  }
}

// The numbers of a row are up to three runs: the first numbers of all pairs, the second ones, and
// what is not rotated; interleaved, the pairs are one run. In vectors each run begins with a
// vector, or with kFixedBytes where bits are fixed, and is followed by zeros.
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
    constexpr int64_t kStep = SumOfRow<T>::kStep;
    const auto padded = [](int64_t n) { return (n + kStep - 1) / kStep * kStep; };
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
      for (; i % SumOfRow<T>::kStep != 0; ++i) to[run.to + i] = 0;
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

// Rows that go through a pass together: one or several times as many as a vector has lanes, so that
// what each row has one number of is a vector.
template <class T, int rows = kLanes<T>>
struct RowGroup {
  static constexpr int kRows = rows;
  int count = 0;
  int64_t position[rows];
  int64_t offset[3][rows];  // of up to three tensors, from where the item begins in each
};

// Calls f(group) until all rows were in one: `heads` heads of `positions` positions of the tensors
// with these strides, in the order in which they lie in memory in the first one.
template <class Group, size_t n, class F>
void for_each_group(int64_t heads, int64_t positions, const std::array<const Strides*, n>& tensors,
                    const F& f) {
  const bool heads_first =
      tensors[0]->row > tensors[0]->head;  // heads of a position are neighbours
  const int64_t outer = heads_first ? positions : heads, inner = heads_first ? heads : positions;
  Group group;
  int count = 0;
  for (int64_t o = 0; o < outer; ++o) {
    int64_t offsets[n], steps[n];  // one multiplication for each row and tensor would be felt
    QKV_UNROLL
    for (size_t t = 0; t < n; ++t) {
      const Strides& s = *tensors[t];
      offsets[t] = o * (heads_first ? s.row : s.head), steps[t] = heads_first ? s.head : s.row;
    }
    for (int64_t i = 0; i < inner; ++i) {
      QKV_UNROLL
      for (size_t t = 0; t < n; ++t) {
        group.offset[t][count] = offsets[t];
        offsets[t] += steps[t];
      }
      group.position[count] = heads_first ? o : i;
      if (++count < Group::kRows) continue;
      group.count = count, count = 0;
      f(group);
    }
  }
  group.count = count;
  if (count > 0) f(group);
}

// One of the tensors of an item: where its rows begin.
template <class E, class Tensor>
auto rows_of(const Rotation& r, const Tensor& tensor, const RotationItem& item) {
  using Element = std::conditional_t<std::is_same_v<Tensor, Input>, const E, E>;
  return static_cast<Element*>(tensor.data) + batch_offset(r, tensor.strides, item.batch) +
         item.begin * tensor.strides.row;
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
