// A rotation (rotation.h): the backward pass. With g for the gradient of n, which is that of y
// turned back, and m = 1 / sqrt(mean(x^2) + eps), it gives for each row
//
//   grad_x      = m * g * weight - m^3 * mean(g * weight * x) * x
//   grad_weight = g * x * m
//   grad_cos_i  = grad_a * n_a + grad_b * n_b
//   grad_sin_i  = grad_b * n_a - grad_a * n_b
#pragma once

#include "kernels/passes/rotate_tables.h"

namespace qkv::QKV_ISA {

// What the rows of an item are added to; null: not wanted.
template <class T>
struct RotationSums {
  T *cos = nullptr, *sin = nullptr;  // as RotationTables has them, but that no number is negated
  double* weight = nullptr;          // [runs.width], to which each group adds its own
  T* weight_of_group = nullptr;
};

// The rows of a group: x and grad in memory of type S, grad_x too; g in vectors, [runs.width] each.
template <class S, class T>
struct GradRows {
  const S *x[kLanes<T>], *grad[kLanes<T>];
  S* grad_x[kLanes<T>];
  T* g[kLanes<T>];
};

// Sets g.
template <bool kInterleaved, class S, class T>
void turn_back(const RotationTables<T>& tables, int64_t position, const S* grad, T* g) {
  const RowRuns<T>& at = tables.runs;
  const T *const cos = tables.cos + position * at.pairs, *const sin =
                                                             tables.sin + position * at.pairs;
  for (int64_t i = 0; i < at.pairs; i += kLanes<T>) {
    const Vec<T> a = load_wide(grad + i), c = load(cos + i), s = load(sin + i);
    if constexpr (kInterleaved) {
      store(g + i, a * c + swap_neighbours(a * s));
    } else {
      const Vec<T> b = load_wide(grad + at.pairs + i);
      store(g + i, a * c + b * s);
      store(g + at.pairs + i, b * c - a * s);
    }
  }
  for (int64_t i = at.rest; i < at.width; i += kLanes<T>) store(g + i, load_wide(grad + i));
}

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

// norms and shares [W]: m, and m^3 * mean(g * weight * x).
template <class S, class T>
void norms_of(const RowRuns<T>& at, const RowGroup<T>& group, const GradRows<S, T>& rows,
              const T* weight, T inverse_dim, T eps, T* norms, T* shares) {
  constexpr int W = kLanes<T>;
  Vec<T> squares[W], dots[W];
  for (int r = group.count; r < W; ++r) squares[r] = dots[r] = Vec<T>{};
  for (int r = 0; r < group.count; ++r) {
    SumOfRow<T> square, dot;
    const auto x = [&](int64_t i) QKV_INLINE_LAMBDA { return load_wide(rows.x[r] + i); };
    for (int64_t i = 0; i < at.width; i += SumOfRow<T>::kStep) {
      square.add([&](int64_t n) QKV_INLINE_LAMBDA { return x(i + n) * x(i + n); });
      dot.add([&](int64_t n) QKV_INLINE_LAMBDA {
        return x(i + n) * (load(rows.g[r] + i + n) * load(weight + i + n));
      });
    }
    squares[r] = square.in_one_vector(), dots[r] = dot.in_one_vector();
  }
  const Vec<T> norm = inverse_norms<T>(squares, inverse_dim, eps);
  store(norms, norm);
  store(shares, norm * norm * norm * (sum_lanes<T>(dots) * inverse_dim));
}

template <bool kNorm, bool kInterleaved, class S, class T>
void rotate_group_backward(const RotationTables<T>& tables, const RowGroup<T>& group,
                           const GradRows<S, T>& rows, const T* weight, T inverse_dim, T eps,
                           const RotationSums<T>& sums) {
  constexpr int W = kLanes<T>;
  const RowRuns<T>& at = tables.runs;
  T norms[W], shares[W];
  for (int r = 0; r < group.count; ++r)
    turn_back<kInterleaved>(tables, group.position[r], rows.grad[r], rows.g[r]);
  if constexpr (kNorm) norms_of(at, group, rows, weight, inverse_dim, eps, norms, shares);
  for (int r = 0; sums.cos && r < group.count; ++r) {
    const int64_t row = group.position[r] * at.pairs;
    add_to_tables<kNorm, kInterleaved>(at, rows.x[r], rows.grad[r], weight, kNorm ? norms[r] : T(1),
                                       sums.cos + row, sums.sin + row);
  }
  // Row after row, so that memory is written to in order. What a group adds to the gradient of the
  // weight is rounded once; where bits are fixed, what a row does, since groups differ.
  for (int r = 0; r < group.count; ++r) {
    for (int64_t i = 0; i < at.width; i += W) {
      Vec<T> g = load(rows.g[r] + i);
      if constexpr (kNorm) {
        const Vec<T> x = load_wide(rows.x[r] + i), of_weight = g * (x * norms[r]);
        store(sums.weight_of_group + i,
              r == 0 || kFixedBits ? of_weight : load(sums.weight_of_group + i) + of_weight);
        g = g * load(weight + i) * norms[r] - x * shares[r];
      }
      store_rounded(rows.grad_x[r] + i, g);
    }
    if (kNorm && (kFixedBits || r + 1 == group.count))
      for (int64_t i = 0; i < at.width; i += kLanes<double>)
        store(sums.weight + i, load(sums.weight + i) + load_double(sums.weight_of_group + i));
  }
}

template <bool kNorm, bool kInterleaved, class E, class T = Compute<E>>
void rotate_tensor_backward(const Rotation& r, const RotationItem& item, int t,
                            const RotationTables<T>& tables, const RotationSums<T>& sums,
                            T* scratch) {
  constexpr int W = kLanes<T>;
  const RowRuns<T>& at = tables.runs;
  const RotatedTensor& tensor = r.tensors[t];
  const Input& grad = item.gradients->grad_output[t];
  const E* const x = rows_of<E>(r, tensor.input, item);
  const E* const grads = rows_of<E>(r, grad, item);
  E* const to = rows_of<E>(r, tensor.output, item);
  const T inverse_dim = T(1) / T(r.head_dim), eps = T(r.eps);
  const Strides &x_strides = tensor.input.strides, &strides = tensor.output.strides;
  const bool is_direct =
      at.is_dense && x_strides.col == 1 && grad.strides.col == 1 && strides.col == 1;
  const int64_t positions = item.end - item.begin, size = W * at.width;
  const std::array<const Strides*, 3> all = {&strides, &x_strides, &grad.strides};
  for_each_group<RowGroup<T>>(tensor.heads, positions, all, [&](const RowGroup<T>& group) {
    GradRows<E, T> rows;
    locate(group, 0, to, rows.grad_x);
    locate(group, 1, x, rows.x), locate(group, 2, grads, rows.grad);
    for (int g = 0; g < group.count; ++g) rows.g[g] = scratch + g * at.width;
    const T* const weight = tables.weights[t];
    if (is_direct)
      return rotate_group_backward<kNorm, kInterleaved>(tables, group, rows, weight, inverse_dim,
                                                        eps, sums);
    GradRows<T, T> wide;
    for (int g = 0; g < group.count; ++g) {
      T *const own = rows.g[g], *const own_x = own + size, *const own_grad = own_x + size;
      at.gather(rows.x[g], x_strides.col, own_x);
      at.gather(rows.grad[g], grad.strides.col, own_grad);
      wide.x[g] = own_x, wide.grad[g] = own_grad, wide.g[g] = wide.grad_x[g] = own;
    }
    rotate_group_backward<kNorm, kInterleaved>(tables, group, wide, weight, inverse_dim, eps, sums);
    for (int g = 0; g < group.count; ++g) at.scatter(wide.g[g], rows.grad_x[g], strides.col);
  });
}

}  // namespace qkv::QKV_ISA
