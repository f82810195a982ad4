// A rotation (rotation.h): the forward pass, and an item of either pass.
#pragma once

#include "kernels/passes/rotate_backward.h"

namespace qkv::QKV_ISA {

// Turns the rows of `input`, in the layout of a tensor's, to its output.
template <bool kNorm, bool kInterleaved, class E, class T = Compute<E>>
void rotate_tensor(const Rotation& r, const RotationItem& item, int t, const Input& input,
                   RotationTables<T>& tables, T* scratch) {
  using Group = RotatedRows<T>;
  const RowRuns<T>& at = tables.runs;
  const RotatedTensor& tensor = r.tensors[t];
  const Strides &in = input.strides, &out = tensor.output.strides;
  const E* const from = rows_of<E>(r, input, item);
  E* const to = rows_of<E>(r, tensor.output, item);
  const T inverse_dim = T(1) / T(r.head_dim), eps = T(r.eps);
  const T* const weight = tables.weights[t];
  const bool is_direct = at.is_dense && in.col == 1 && out.col == 1;
  is_direct ? tables.template arrange_for<E>(t) : tables.template arrange_for<T>(t);
  const std::array<const Strides*, 2> strides = {&in, &out};
  for_each_group<Group>(tensor.heads, item.end - item.begin, strides, [&](const Group& group) {
    const RowsOfGroup<const E> x{from, group.offset[0]};
    const RowsOfGroup<E> y{to, group.offset[1]};
    if (is_direct) {
      RotatedGroup<kNorm, kInterleaved, E, T> direct{tables, group, weight, x, y, {}};
      return direct.run(inverse_dim, eps);
    }
    int64_t offsets[Group::kRows];
    const RowsOfGroup<T> rows{scratch, offsets};
    for (int g = 0; g < group.count; ++g) {
      offsets[g] = g * at.width;
      at.gather(x[g], in.col, rows[g]);
    }
    RotatedGroup<kNorm, kInterleaved, T, T> gathered{tables, group, weight, {scratch, offsets},
                                                     rows,   {}};
    gathered.run(inverse_dim, eps);
    for (int g = 0; g < group.count; ++g) at.scatter(rows[g], y[g], out.col);
  });
}

// The sums of an item of the backward pass, from its scratch memory to where they are wanted.
template <class T>
void leave_sums(const Rotation& r, const RotationItem& item, const RowRuns<T>& at,
                const RotationSums<T>& sums, int t) {
  for (const auto& run : at.runs)
    for (int64_t i = 0; sums.weight && item.weight_sums[t] && i < run.count; ++i)
      item.weight_sums[t][run.from + i] = sums.weight[run.to + i];
  if (!sums.cos) return;
  T *cos = static_cast<T*>(item.cos_sums), *sin = static_cast<T*>(item.sin_sums);
  for (int64_t p = 0; p < item.end - item.begin; ++p) {
    const T *const c = sums.cos + p * at.pairs, *const s = sums.sin + p * at.pairs;
    for (int64_t i = 0; i < r.rotary_pairs; ++i) {
      *cos++ = r.is_interleaved ? c[2 * i] + c[2 * i + 1] : c[i];
      *sin++ = r.is_interleaved ? s[2 * i + 1] - s[2 * i] : s[i];
    }
  }
}

// Calls f(whether there is a norm, whether pairs are neighbours), which are constants.
template <class F>
void with_kind(bool norm, bool interleaved, const F& f) {
  using True = std::true_type;
  using False = std::false_type;
  if (norm) return interleaved ? f(True(), True()) : f(True(), False());
  return interleaved ? f(False(), True()) : f(False(), False());
}

template <class E>
size_t rotate(const Rotation& r, const RotationItem& item, void* workspace) {
  using T = Compute<E>;
  Arena arena(workspace);
  RotationTables<T> tables(r, item, arena);
  const RowRuns<T>& at = tables.runs;
  const bool is_backward = item.gradients != nullptr;
  T* const scratch =
      arena.take<T>((is_backward ? 3 * kLanes<T> : RotatedRows<T>::kRows) * at.width);
  RotationSums<T> sums;
  const int64_t table_size = kRotationBlock * at.pairs;
  if (is_backward && item.gradients->wants_tables())
    sums.cos = arena.take<T>(table_size), sums.sin = arena.take<T>(table_size);
  if (is_backward) sums.weight = arena.take<double>(at.width);
  if (arena.counting()) return arena.used();
  if (sums.cos) std::fill_n(sums.cos, table_size, T(0)), std::fill_n(sums.sin, table_size, T(0));
  for (int t = 0; t < 2; ++t) {
    if (is_backward) std::fill_n(sums.weight, at.width, 0.0);
    if (r.tensors[t].heads > 0)
      with_kind(tables.weights[t], r.is_interleaved, [&](auto norm, auto interleaved) {
        if (is_backward && (norm || sums.cos))
          return rotate_tensor_backward<norm, interleaved, E>(r, item, t, tables, sums, scratch);
        const Input& input = is_backward ? item.gradients->grad_output[t] : r.tensors[t].input;
        rotate_tensor<norm, interleaved, E>(r, item, t, input, tables, scratch);
      });
    if (!is_backward) continue;
    RotationSums<T> left = sums;
    if (t == 0) left.cos = nullptr;  // to which the second tensor adds
    leave_sums(r, item, at, left, t);
  }
  return arena.used();
}

}  // namespace qkv::QKV_ISA
