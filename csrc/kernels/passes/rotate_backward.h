// A rotation (rotation.h): the backward pass. With g for the gradient of n, which is that of y
// turned back, and m = 1 / sqrt(mean(x^2) + eps), it gives for each row
//
//   grad_x      = m * g * weight - m^3 * mean(g * weight * x) * x
//   grad_weight = g * x * m
//   grad_cos_i  = grad_a * n_a + grad_b * n_b
//   grad_sin_i  = grad_b * n_a - grad_a * n_b
#pragma once

#include "kernels/passes/rotate_group.h"

namespace qkv::QKV_ISA {

// What the rows of an item are added to; null: not wanted.
template <class T>
struct RotationSums {
  T *cos = nullptr, *sin = nullptr;  // as RotationTables has them, but that no number is negated
  double* weight = nullptr;          // [runs.width], to which each group adds its own
};

// Adds a row to the gradients of cos and sin of its position.
template <bool kNorm, bool kInterleaved, class S, class T>
void add_to_tables(const RowRuns<T>& at, const S* x, const S* grad, const T* weight, T norm, T* cos,
                   T* sin) {
  const auto normal = [&](int64_t i) QKV_INLINE_LAMBDA {
    const Vec<T> v = load_wide(x + i);
    return kNorm ? v * norm * load(weight + i) : v;
  };
  for (int64_t i = 0; i < at.pairs; i += kLanes<T>) {
    const Vec<T> n = normal(i), a = load_wide(grad + i);
    if constexpr (kInterleaved) {
      store(cos + i, load(cos + i) + a * n);
      store(sin + i, load(sin + i) + a * swap_neighbours(n));
    } else {
      const Vec<T> m = normal(at.pairs + i), b = load_wide(grad + at.pairs + i);
      store(cos + i, load(cos + i) + (a * n + b * m));
      store(sin + i, load(sin + i) + (b * n - a * m));
    }
  }
}

// The rows of a group, in memory of type S, for which the tables, which turn back, and the weight
// are arranged. Of each, `grad` becomes g, of which x and g give grad_x; that may be g's memory.
template <bool kNorm, bool kInterleaved, class S, class T>
struct GradientGroup {
  using Group = RowGroup<T>;
  const RotationTables<T>& tables;
  const Group& group;
  const T* weight;
  double* weight_sums;
  RowsOfGroup<const S> x, grad;
  RowsOfGroup<T> g;
  RowsOfGroup<S> grad_x;
  alignas(kVectorBytes) T norms[kLanes<T>], shares[kLanes<T>];  // m; m^3 * mean(g * weight * x)

  QKV_INLINE void run(T inverse_dim, T eps) {
    constexpr int W = kLanes<T>;
    const RowRuns<T>& at = tables.runs;
    Vec<T> squares[W], dots[W];
    for (int r = group.count; r < W; ++r) squares[r] = dots[r] = Vec<T>{};
    for (int r = 0; r < group.count; ++r) turn_back(r, squares[r], dots[r]);
    if constexpr (kNorm) {
      const Vec<T> norm = inverse_norms<T>(squares, inverse_dim, eps);
      store(norms, norm);
      store(shares, norm * norm * norm * (sum_lanes<T>(dots) * inverse_dim));
    }
    for_blocks_of_row(at, [&](auto n, auto is_turned, int64_t i) QKV_INLINE_LAMBDA {
      if constexpr (is_turned && !kInterleaved)
        leave<n, 2>({i, at.pairs + i});
      else
        leave<n, 1>({i});
    });
  }

 private:
  // Sets g of a row, and what the lanes of its squares, and of g * weight * x, add up to.
  QKV_INLINE void turn_back(int r, Vec<T>& squares, Vec<T>& dots) const {
    const int64_t pairs = tables.runs.pairs, position = group.position[r] * pairs;
    const T *const cos = tables.cos + position, *const sin = tables.sin + position;
    const S *const from = grad[r], *const own = x[r];
    T* const to = g[r];
    SumOfRow<T> square, dot;
    const auto add = [&](auto n, int64_t i, const Vec<T>* turned) QKV_INLINE_LAMBDA {
      Vec<T> v[n];
      if (kNorm) load_vectors<n>(own + i, v);
      for (int h = 0; h < n; ++h) {
        const int64_t column = i + h * kLanes<T>;
        store(to + column, turned[h]);
        if (!kNorm) continue;
        square.add_at(column, v[h] * v[h]);
        dot.add_at(column, v[h] * (turned[h] * load(weight + column)));
      }
    };
    // Where bits are fixed, the sums take one vector after the other: how many numbers two of them
    // have depends on the instruction set.
    for_blocks_of_row<kFixedBits ? 1 : 2>(
        tables.runs, [&](auto n, auto is_turned, int64_t i) QKV_INLINE_LAMBDA {
          Vec<T> a[n], b[n], left[n], right[n];
          load_vectors<n>(from + i, a);
          if constexpr (!is_turned) return add(n, i, a);
          if (!kInterleaved) load_vectors<n>(from + pairs + i, b);
          turn<n, kInterleaved, S, T>(a, b, cos + i, sin + i, left, right);
          add(n, i, left);
          if (!kInterleaved) add(n, pairs + i, right);
        });
    squares = square.in_one_vector(), dots = dot.in_one_vector();
  }

  // n vectors of all rows at each of `columns`, so that the weight and what is added to its
  // gradient stay in registers. What a group adds is rounded once; where bits are fixed, what a row
  // does, since groups differ.
  template <int n, int blocks>
  QKV_INLINE void leave(const int64_t (&columns)[blocks]) const {
    constexpr int W = kLanes<T>;
    Vec<T> v[n], to[n], w[blocks][n], sum[blocks][n] = {};
    QKV_UNROLL
    for (int b = 0; b < blocks; ++b)
      for (int h = 0; kNorm && h < n; ++h) w[b][h] = load(weight + columns[b] + h * W);
    for (int r = 0; r < group.count; ++r) {
      QKV_UNROLL
      for (int b = 0; b < blocks; ++b) {
        const int64_t i = columns[b];
        if (kNorm) load_vectors<n>(x[r] + i, v);
        for (int h = 0; h < n; ++h) {
          to[h] = load(g[r] + i + h * W);
          if (!kNorm) continue;
          sum[b][h] += to[h] * (v[h] * norms[r]);
          to[h] = to[h] * w[b][h] * norms[r] - v[h] * shares[r];
        }
        store_vectors<n>(grad_x[r] + i, to);
        if (kNorm && kFixedBits) add_to_weight<n>(i, sum[b]);
      }
    }
    QKV_UNROLL
    for (int b = 0; kNorm && !kFixedBits && b < blocks; ++b) add_to_weight<n>(columns[b], sum[b]);
  }

  // Adds sum, which becomes zero.
  template <int n>
  QKV_INLINE void add_to_weight(int64_t i, Vec<T>* sum) const {
    constexpr int W = kLanes<T>;
    T numbers[n * W];
    for (int h = 0; h < n; ++h) store(numbers + h * W, sum[h]), sum[h] = Vec<T>{};
    if constexpr (n == 2 && kInParts<S>) from_parts<S, T>(numbers);
    for (int h = 0; h < n * W; h += kLanes<double>)
      store(weight_sums + i + h, load(weight_sums + i + h) + load_double(numbers + h));
  }
};

template <bool kNorm, bool kInterleaved, class E, class T = Compute<E>>
void rotate_tensor_backward(const Rotation& r, const RotationItem& item, int t,
                            RotationTables<T>& tables, const RotationSums<T>& sums, T* scratch) {
  using Group = RowGroup<T>;
  const RowRuns<T>& at = tables.runs;
  const RotatedTensor& tensor = r.tensors[t];
  const Input& grad_output = item.gradients->grad_output[t];
  const E* const x = rows_of<E>(r, tensor.input, item);
  const E* const grad = rows_of<E>(r, grad_output, item);
  E* const grad_x = rows_of<E>(r, tensor.output, item);
  const T inverse_dim = T(1) / T(r.head_dim), eps = T(r.eps);
  const T* const weight = tables.weights[t];
  const std::array<const Strides*, 3> strides = {&tensor.output.strides, &tensor.input.strides,
                                                 &grad_output.strides};
  // What is added up along a row or a table is so in the order of the row.
  bool is_direct = at.is_dense && !(kInParts<E> && (kFixedBits || sums.cos));
  for (const Strides* s : strides) is_direct = is_direct && s->col == 1;
  is_direct ? tables.template arrange_for<E>(t) : tables.template arrange_for<T>(t);
  int64_t offsets[Group::kRows];
  for (int g = 0; g < Group::kRows; ++g) offsets[g] = g * at.width;
  const int64_t size = Group::kRows * at.width;
  const RowsOfGroup<T> g{scratch, offsets}, own_x{g.base + size, offsets},
      own_grad{own_x.base + size, offsets};
  const auto run = [&](const Group& group, auto rows_x, auto rows_grad, auto rows_to) {
    using S = std::remove_const_t<std::remove_pointer_t<decltype(rows_to.base)>>;
    GradientGroup<kNorm, kInterleaved, S, T> rows{tables,    group, weight,  sums.weight, rows_x,
                                                  rows_grad, g,     rows_to, {},          {}};
    rows.run(inverse_dim, eps);
    for (int n = 0; sums.cos && n < group.count; ++n)
      add_to_tables<kNorm, kInterleaved>(
          at, rows_x[n], rows_grad[n], weight, kNorm ? rows.norms[n] : T(1),
          sums.cos + group.position[n] * at.pairs, sums.sin + group.position[n] * at.pairs);
  };
  for_each_group<Group>(tensor.heads, item.end - item.begin, strides, [&](const Group& group) {
    const RowsOfGroup<const E> rows_x{x, group.offset[1]}, rows_grad{grad, group.offset[2]};
    const RowsOfGroup<E> rows_to{grad_x, group.offset[0]};
    if (is_direct) return run(group, rows_x, rows_grad, rows_to);
    for (int n = 0; n < group.count; ++n) {
      at.gather(rows_x[n], strides[1]->col, own_x[n]);
      at.gather(rows_grad[n], strides[2]->col, own_grad[n]);
    }
    run(group, RowsOfGroup<const T>{own_x.base, offsets},
        RowsOfGroup<const T>{own_grad.base, offsets}, g);
    for (int n = 0; n < group.count; ++n) at.scatter(g[n], rows_to[n], strides[0]->col);
  });
}

}  // namespace qkv::QKV_ISA
