// The scratch memory of the forward pass, and how the output of a tile leaves it.
#pragma once

#include "kernels/passes/forward_few_rows.h"
#include "kernels/passes/forward_tiles.h"
#include "kernels/passes/kept_weights.h"
#include "kernels/score/dropout.h"
#include "kernels/score/sinks.h"
#include "kernels/score/softmax.h"
#include "kernels/simd/log.h"

namespace qkv::QKV_ISA {

// What a tile of queries carries from one block of keys to the next: the state of the online
// softmax. P multiplies: ForwardTiles or ForwardFewRows.
template <class P, class T = Compute<typename P::Element>>
struct ForwardState {
  Tile tile;
  typename P::Factor* memory;
  typename P::Query query;  // packed in that memory
  T* output;                // [Dv x lanes], or laid out as P does; not yet divided by sum
  T *max, *sum;             // [lanes]
  T* own_sum;               // [lanes], the sum that output is divided by if P::has_own_sum
  bool has_output;          // whether anything has been written to output
  KeptWeights<T> weights;
};

template <class P>
struct ForwardScratch {
  using T = Compute<typename P::Element>;
  using Factor = typename P::Factor;

  P products;
  T* rescale;
  T* scores;  // of a block of keys, where KeptWeights has no place for them
  T* spare;   // a second output, for add_values, where pairs can be hidden
  Dropout<T> dropout;
  ForwardState<P>* tiles;
  bool saw_nonfinite = false;  // whether a block of values held NaN or an infinity

  ForwardScratch(Arena& arena, const Problem& p, int64_t rows_count, bool with_weights)
      : products(arena, p),
        rescale(arena.take<T>(kTileRows<T>)),
        scores(arena.take<T>(kTileRows<T> * kKeyBlock)),
        spare(hides_any(p) ? arena.take<T>(P::output_size(p)) : nullptr),
        dropout(p) {
    const int64_t count = (rows_count + kTileRows<T> - 1) / kTileRows<T>;
    const int64_t query_size = P::query_size(p), output_size = P::output_size(p);
    tiles = arena.take<ForwardState<P>>(count);
    Factor* query = arena.take<Factor>(count * query_size);
    T* output = arena.take<T>(count * output_size);
    T* state = arena.take<T>(count * kTileRows<T> * 3);
    const int64_t weights_size = with_weights ? KeptWeights<T>::size(p) : 0;
    T* weights = arena.take<T>(count * weights_size);
    if (arena.counting()) return;
    for (int64_t t = 0; t < count; ++t) {
      tiles[t].memory = query + t * query_size;
      tiles[t].output = output + t * output_size;
      tiles[t].max = state + t * kTileRows<T> * 3;
      tiles[t].sum = tiles[t].max + kTileRows<T>;
      tiles[t].own_sum = tiles[t].sum + kTileRows<T>;
      tiles[t].weights = KeptWeights<T>(with_weights ? weights + t * weights_size : nullptr);
    }
  }
};

// out [lanes] = the log-sum-exps of a tile, -inf for rows that have seen no key, from the largest
// scores and the sums of the online softmax. They are computed in double, because a logarithm that
// is rounded twice would show in the gradients. `from` [lanes], if not null, is taken off them.
template <class T, class R>
void log_sum_exp(const Tile& tile, const T* max_state, const T* sum_state, const T* from, T* out) {
  constexpr int W = kLanes<T>, N = W / kLanes<double>;
  for (int v = 0; v < tile.lanes; v += W) {
    const R reference(load(max_state + v));
    T base[W], shift[W];
    store(base, reference.base);
    store(shift, reference.shift);
    Vec<double> sum[N];
    QKV_UNROLL
    for (int i = 0; i < N; ++i) sum[i] = load_double(sum_state + v + i * kLanes<double>);
    log<N>(sum);
    QKV_UNROLL
    for (int i = 0; i < N; ++i) {
      const int at = i * kLanes<double>;
      Vec<double> offset = load_double(base + at) + load_double(shift + at) * kLn2;
      if (from) offset -= load_double(from + v + at);
      store_double(out + v + at, sum[i] + offset);
    }
  }
}

// Writes the numbers [lanes] of a tile, the first to row `begin`.
template <class T>
void write_numbers(const Tile& tile, const T* numbers, const Rows<T>& to, int64_t begin) {
  if (to.group == 1 && to.row == 1)
    std::memcpy(to[begin], numbers, size_t(tile.rows) * sizeof(T));
  else
    for (int l = 0; l < tile.rows; ++l) *to[begin + l] = numbers[l];
}

// Divides the output of a tile, and its weights if they are wanted, by the sum of the weights, and
// writes them.
template <class P>
void finish_tile(const Problem& p, const ForwardResult& result, const ForwardItem& item,
                 const ForwardScratch<P>& scratch, ForwardState<P>& state) {
  using E = typename P::Element;
  using T = Compute<E>;
  const Tile& tile = state.tile;
  const auto divide_by = [&](T* sums) {
    if (p.by_head[kSinks].data && !item.partial_output) finish_sinks(p, tile, state.max, sums);
    for (int v = 0; v < tile.lanes; v += kLanes<T>) {
      const Vec<T> sum = load(sums + v);
      store(scratch.rescale + v, sum == 0 ? Vec<T>{} : T(dropout_scale(p.dropout_p)) / sum);
    }
  };
  if (!state.has_output) std::fill_n(state.output, P::output_size(p), T(0));
  divide_by(state.sum);
  if (result.weights.data) state.weights.add_to(p, result, tile, scratch.rescale, scratch.scores);
  if (P::has_own_sum(p)) divide_by(state.own_sum);
  const auto write = [&](const auto& output, const Rows<T>& lse, int64_t begin, const T* from) {
    if (output.data) scratch.products.write(tile, scratch.rescale, state.output, output, begin);
    if (!lse.data) return;
    T numbers[kTileRows<T>];
    log_sum_exp<T, typename P::Reference>(tile, state.max, state.sum, from, numbers);
    write_numbers(tile, numbers, lse, begin);
  };
  if (!item.partial_output)
    return write(rows_of<E>(p, result.output, tile.plane), rows_of<T>(p, result.lse, tile.plane),
                 tile.row, nullptr);
  T from[kTileRows<T>];
  for (int l = 0; l < tile.lanes; ++l) from[l] = state.max[l] == -kInfinity<T> ? 0 : state.max[l];
  const int64_t begin = tile.row - item.row_begin;
  const auto numbers = [](void* at) { return Rows<T>{static_cast<T*>(at), 1, 0, 1, 1}; };
  write_numbers(tile, from, numbers(item.partial_max), begin);
  write(Rows<T>{static_cast<T*>(item.partial_output), 1, 0, p.head_dim_v, 1},
        numbers(item.partial_lse), begin, from);
}

}  // namespace qkv::QKV_ISA
