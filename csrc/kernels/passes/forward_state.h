// The scratch memory of the forward pass, and how the output of a tile leaves it.
#pragma once

#include "kernels/operands/rows.h"
#include "kernels/operands/tile.h"
#include "kernels/passes/kept_weights.h"
#include "kernels/score/dropout.h"
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
  T* max;                   // [lanes]
  T* sum;                   // [lanes]
  KeptWeights<T> weights;
};

template <class P>
struct ForwardScratch {
  using T = Compute<typename P::Element>;
  using Factor = typename P::Factor;

  P products;
  T *rows, *rescale;
  T* scores;  // of a block of keys, where KeptWeights has no place for them
  T* spare;   // a second output, for add_values, where pairs can be hidden
  Dropout<T> dropout;
  ForwardState<P>* tiles;
  bool saw_nonfinite = false;  // whether a block of values held NaN or an infinity

  ForwardScratch(Arena& arena, const Problem& p, int64_t rows_count, bool with_weights)
      : products(arena, p),
        rows(arena.take<T>(kTileRows<T> * padded<T>(p.head_dim_v))),
        rescale(arena.take<T>(kTileRows<T>)),
        scores(arena.take<T>(kTileRows<T> * kKeyBlock)),
        spare(hides_any(p) ? arena.take<T>(P::output_size(p)) : nullptr),
        dropout(p) {
    const int64_t count = (rows_count + kTileRows<T> - 1) / kTileRows<T>;
    const int64_t query_size = P::query_size(p), output_size = P::output_size(p);
    tiles = arena.take<ForwardState<P>>(count);
    Factor* query = arena.take<Factor>(count * query_size);
    T* output = arena.take<T>(count * output_size);
    T* state = arena.take<T>(count * kTileRows<T> * 2);
    const int64_t weights_size = with_weights ? KeptWeights<T>::size(p) : 0;
    T* weights = arena.take<T>(count * weights_size);
    if (arena.counting()) return;
    for (int64_t t = 0; t < count; ++t) {
      tiles[t].memory = query + t * query_size;
      tiles[t].output = output + t * output_size;
      tiles[t].max = state + t * kTileRows<T> * 2;
      tiles[t].sum = tiles[t].max + kTileRows<T>;
      tiles[t].weights = KeptWeights<T>(with_weights ? weights + t * weights_size : nullptr);
    }
  }
};

// out [lanes] = the log-sum-exps of a tile, -inf for rows that have seen no key, from the largest
// scores and the sums of the online softmax. They are computed in double, because a logarithm that
// is rounded twice would show in the gradients.
template <class T>
void log_sum_exp(const Tile& tile, const T* max_state, const T* sum_state, double* out) {
  constexpr int W = kLanes<T>;
  for (int v = 0; v < tile.lanes; v += W) {
    const Reference<T> reference(load(max_state + v));
    constexpr int N = W / kLanes<double>;
    double sums[W];
    QKV_UNROLL
    for (int i = 0; i < W; ++i) sums[i] = sum_state[v + i];
    Vec<double> sum[N];
    QKV_UNROLL
    for (int i = 0; i < N; ++i) sum[i] = load(sums + i * kLanes<double>);
    log<N>(sum);
    QKV_UNROLL
    for (int i = 0; i < W; ++i)
      out[v + i] = sum[i / kLanes<double>][i % kLanes<double>] +
                   (double(reference.base[i]) + reference.shift[i] * kLn2);
  }
}

// Writes the rows [lanes, padded(Dv)] and the log-sum-exps of a tile, its first row to row `begin`.
template <class E, class T>
void write_tile(const Problem& p, const Tile& tile, int64_t begin, const T* rows,
                const double* log_sum, const Rows<E>& output, const Rows<T>& lse) {
  for (int l = 0; l < tile.rows; ++l) {
    const int64_t r = begin + l;
    if (output.data)
      scatter_row(rows + l * padded<T>(p.head_dim_v), false, p.head_dim_v, output[r], output.col);
    if (lse.data) *lse[r] = T(log_sum[l]);
  }
}

// Divides the output of a tile, and its weights if they are wanted, by the sum of the weights, and
// writes them.
template <class P>
void finish_tile(const Problem& p, const ForwardResult& result, const ForwardItem& item,
                 const ForwardScratch<P>& scratch, ForwardState<P>& state) {
  using E = typename P::Element;
  using T = Compute<E>;
  const Tile& tile = state.tile;
  for (int v = 0; v < tile.lanes; v += kLanes<T>) {
    const Vec<T> sum = load(state.sum + v);
    store(scratch.rescale + v, sum == 0 ? Vec<T>{} : T(dropout_scale(p.dropout_p)) / sum);
  }
  if (result.weights.data) state.weights.add_to(p, result, tile, scratch.rescale, scratch.scores);
  const T* rows = scratch.products.output_rows(tile, scratch.rescale, state.output, scratch.rows);
  double log_sum[kTileRows<T>];
  log_sum_exp(tile, state.max, state.sum, log_sum);

  if (item.partial_output)
    return write_tile(p, tile, tile.row - item.row_begin, rows, log_sum,
                      Rows<T>{static_cast<T*>(item.partial_output), 1, 0, p.head_dim_v, 1},
                      Rows<T>{static_cast<T*>(item.partial_lse), 1, 0, 1, 1});
  write_tile(p, tile, tile.row, rows, log_sum,
             rows_of<E>(p, result.output, tile.batch, tile.kv_head),
             rows_of<T>(p, result.lse, tile.batch, tile.kv_head));
}

}  // namespace qkv::QKV_ISA
