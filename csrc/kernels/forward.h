// The forward pass over one ForwardBlock.
namespace qkv::QKV_ISA {

// What a tile of queries carries from key block to key block.
template <class T>
struct ForwardState {
  Tile tile;
  T* query;   // [D x lanes], times scale
  T* output;  // [Dv x lanes], not yet divided by sum
  T* max;     // [lanes]
  T* sum;     // [lanes]
};

template <class T>
struct ForwardScratch {
  T *rows, *scores, *rescale;
  Dropout<T> dropout;
  ForwardState<T>* tiles;

  ForwardScratch(Arena& arena, const Problem& p, int64_t rows_count)
      : rows(arena.take<T>(kRowBlock<T> * padded<T>(std::max(p.head_dim, p.head_dim_v)))),
        scores(arena.take<T>(kRowBlock<T> * kKeyBlock)),
        rescale(arena.take<T>(kRowBlock<T>)),
        dropout(p) {
    const int64_t count = (rows_count + kRowBlock<T> - 1) / kRowBlock<T>;
    tiles = arena.take<ForwardState<T>>(count);
    // Padded rows of D and Dv: the transpositions work on whole vectors.
    T* query = arena.take<T>(count * kRowBlock<T> * padded<T>(p.head_dim));
    T* output = arena.take<T>(count * kRowBlock<T> * padded<T>(p.head_dim_v));
    T* state = arena.take<T>(count * kRowBlock<T> * 2);
    if (arena.counting()) return;
    for (int64_t t = 0; t < count; ++t) {
      tiles[t].query = query + t * kRowBlock<T> * padded<T>(p.head_dim);
      tiles[t].output = output + t * kRowBlock<T> * padded<T>(p.head_dim_v);
      tiles[t].max = state + t * kRowBlock<T> * 2;
      tiles[t].sum = tiles[t].max + kRowBlock<T>;
    }
  }
};

// The softmax's denominator begins with the sink.
template <class T>
void add_sinks(const Problem& p, const ForwardState<T>& state) {
  constexpr int W = kLanes<T>;
  for (int v = 0; v < state.tile.lanes / W; ++v) {
    const Vec<T> sink = per_head<T>(p, state.tile, p.sinks, v);
    const Reference<T> reference(sink);
    Vec<T> weight[] = {sink - reference.base};
    exp<T>(weight, {ShiftedExp<T>(reference.shift)});
    store(state.max + v * W, sink);
    store(state.sum + v * W, weight[0]);
  }
}

template <class T>
void begin_tile(const Problem& p, const Tile& tile, bool with_sink, T* rows,
                ForwardState<T>& state) {
  state.tile = tile;
  pack_queries(p, tile, rows, state.query);
  std::fill(state.output, state.output + tile.lanes * padded<T>(p.head_dim_v), T(0));
  std::fill(state.max, state.max + tile.lanes, -kInfinity<T>);
  std::fill(state.sum, state.sum + tile.lanes, T(0));
  if (with_sink) add_sinks(p, state);
}

// Keys [key, key + keys) for one tile of queries.
template <class T>
void attend(const Problem& p, const T* key_rows, const T* value_rows, int64_t key, int64_t keys,
            const ForwardScratch<T>& scratch, ForwardState<T>& state) {
  const int lanes = state.tile.lanes;
  const Strides& k = p.key.strides;
  const Strides& v = p.value.strides;
  gemm<T>(keys, lanes,
          {p.head_dim, key_rows + key * k.row, k.row, k.col, state.query, lanes, scratch.scores,
           lanes, Beta::zero, nullptr});
  apply_score_options<T>(p, state.tile, key, keys, scratch.scores, nullptr);
  if (lanes == kLanes<T>) {
    softmax_tile<T, 1>(keys, scratch.scores, state.max, state.sum, scratch.rescale);
  } else {
    softmax_tile<T, 2>(keys, scratch.scores, state.max, state.sum, scratch.rescale);
  }
  if (p.dropout_p > 0) drop_weights(p, scratch.dropout, state.tile, key, keys, scratch.scores);
  gemm<T>(p.head_dim_v, lanes,
          {keys, value_rows + key * v.row, v.col, v.row, scratch.scores, lanes, state.output, lanes,
           Beta::lanes, scratch.rescale});
}

// The log-sum-exps of a tile, in double: a logarithm rounded twice would show in
// the gradients. -inf for rows that have seen no key.
template <class T>
void log_sum_exp(const ForwardState<T>& state, double* out) {
  constexpr int W = kLanes<T>;
  for (int v = 0; v < state.tile.lanes; v += W) {
    const Reference<T> reference(load(state.max + v));
    constexpr int N = W / kLanes<double>;
    Vec<double> sum[N];
    QKV_UNROLL
    for (int i = 0; i < W; ++i) sum[i / kLanes<double>][i % kLanes<double>] = state.sum[v + i];
    log<N>(sum);
    QKV_UNROLL
    for (int i = 0; i < W; ++i)
      out[v + i] = sum[i / kLanes<double>][i % kLanes<double>] +
                   (double(reference.base[i]) + reference.shift[i] * kLn2);
  }
}

// Normalizes a tile and writes its rows and log-sum-exps.
template <class T>
void finish_tile(const Problem& p, const ForwardResult& result, const ForwardBlock& block, T* rows,
                 ForwardState<T>& state) {
  constexpr int W = kLanes<T>;
  const Tile& tile = state.tile;
  const int64_t step = padded<T>(p.head_dim_v);
  for (int v = 0; v < tile.lanes; v += W) {
    const Vec<T> sum = load(state.sum + v);
    const Vec<T> inverse = sum == 0 ? Vec<T>{} : T(dropout_scale(p.dropout_p)) / sum;
    for (int64_t d = 0; d < p.head_dim_v; ++d)
      store(state.output + d * tile.lanes + v, load(state.output + d * tile.lanes + v) * inverse);
  }
  transpose<T>(state.output, tile.lanes, rows, step, step, tile.lanes, T(1));
  double log_sum[kRowBlock<T>];
  log_sum_exp(state, log_sum);

  const bool partial = block.partial_output != nullptr;
  const Rows<T> output = partial
                             ? Rows<T>{static_cast<T*>(block.partial_output), 1, 0, p.head_dim_v, 1}
                             : rows_of<T>(p, result.output, tile.batch, tile.kv_head);
  const Rows<T> lse = partial ? Rows<T>{static_cast<T*>(block.partial_lse), 1, 0, 1, 1}
                              : rows_of<T>(p, result.lse, tile.batch, tile.kv_head);
  for (int l = 0; l < tile.rows; ++l) {
    const int64_t r = tile.row + l, to = partial ? r - block.row_begin : r;
    const T* from = rows + l * step;
    scatter_row(from, false, p.head_dim_v, output[to], output.col);
    if (lse.data) *lse[to] = T(log_sum[l]);
    if (!partial && may_leak(p) && nonfinite(from, p.head_dim_v))
      repair_output(p, result, tile.batch, tile.kv_head, r, double(state.sum[l]));
  }
}

template <class T>
void forward(const Problem& p, const ForwardResult& result, const ForwardBlock& block,
             void* workspace) {
  Arena arena(workspace);
  const ForwardScratch<T> scratch(arena, p, block.row_end - block.row_begin);
  const T* key_rows = plane<T>(p, p.key, block.batch, block.kv_head);
  const T* value_rows = plane<T>(p, p.value, block.batch, block.kv_head);

  const bool with_sink = p.sinks.data && block.key_begin == 0;
  int64_t tiles = 0;
  for (int64_t row = block.row_begin; row < block.row_end; row += kRowBlock<T>, ++tiles)
    begin_tile(p, make_tile<T>(p, block.batch, block.kv_head, row, block.row_end), with_sink,
               scratch.rows, scratch.tiles[tiles]);
  // Keys outside, tiles inside: a block of keys and values is read from afar
  // once and serves every tile. Where blocks begin does not depend on the tiles.
  const int64_t step = key_step(block.key_end - block.key_begin);
  const int64_t last = std::min(block.key_end, scratch.tiles[tiles - 1].tile.key_end);
  int64_t key = block.key_begin;
  key += std::max<int64_t>(0, scratch.tiles[0].tile.key_begin - key) / step * step;
  for (; key < last; key += step) {
    for (int64_t t = 0; t < tiles; ++t) {
      const Tile& tile = scratch.tiles[t].tile;
      const int64_t begin = std::max(key, tile.key_begin);
      const int64_t keys = std::min({key + step, last, tile.key_end}) - begin;
      if (keys > 0) attend(p, key_rows, value_rows, begin, keys, scratch, scratch.tiles[t]);
    }
  }
  for (int64_t t = 0; t < tiles; ++t) finish_tile(p, result, block, scratch.rows, scratch.tiles[t]);
}

template <class T>
size_t forward_workspace(const Problem& p, int64_t rows) {
  Arena arena(nullptr);
  ForwardScratch<T>(arena, p, rows);
  return arena.used();
}

}  // namespace qkv::QKV_ISA
