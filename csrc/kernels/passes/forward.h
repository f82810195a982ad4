// The forward pass over one ForwardBlock: a range of rows against a range of keys of one plane.
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
};

template <class P>
struct ForwardScratch {
  using T = Compute<typename P::Element>;
  using Factor = typename P::Factor;

  P products;
  T *rows, *scores, *rescale;
  T* spare;  // a second output, for add_values, where pairs can be hidden
  Dropout<T> dropout;
  ForwardState<P>* tiles;
  bool saw_nonfinite = false;  // whether a block of values held NaN or an infinity

  ForwardScratch(Arena& arena, const Problem& p, int64_t rows_count)
      : products(arena, p),
        rows(arena.take<T>(kRowBlock<T> * padded<T>(p.head_dim_v))),
        scores(arena.take<T>(kRowBlock<T> * kKeyBlock)),
        rescale(arena.take<T>(kRowBlock<T>)),
        spare(hides_any(p) ? arena.take<T>(P::output_size(p)) : nullptr),
        dropout(p) {
    const int64_t count = (rows_count + kRowBlock<T> - 1) / kRowBlock<T>;
    const int64_t query_size = P::query_size(p), output_size = P::output_size(p);
    tiles = arena.take<ForwardState<P>>(count);
    Factor* query = arena.take<Factor>(count * query_size);
    T* output = arena.take<T>(count * output_size);
    T* state = arena.take<T>(count * kRowBlock<T> * 2);
    if (arena.counting()) return;
    for (int64_t t = 0; t < count; ++t) {
      tiles[t].memory = query + t * query_size;
      tiles[t].output = output + t * output_size;
      tiles[t].max = state + t * kRowBlock<T> * 2;
      tiles[t].sum = tiles[t].max + kRowBlock<T>;
    }
  }
};

// A sink is a score without a value: with sinks, the sum of the softmax begins with exp(sink).
template <class P, class T = Compute<typename P::Element>>
void add_sinks(const Problem& p, const ForwardState<P>& state) {
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

template <class P>
void begin_tile(const Problem& p, const Tile& tile, bool with_sink, P& products,
                ForwardState<P>& state) {
  using T = Compute<typename P::Element>;
  state.tile = tile;
  state.query = products.pack(tile, state.memory);
  std::fill_n(state.output, P::output_size(p), T(0));
  std::fill(state.max, state.max + tile.lanes, -kInfinity<T>);
  std::fill(state.sum, state.sum + tile.lanes, T(0));
  if (with_sink) add_sinks(p, state);
}

// Adds the values of keys [key, key + keys), whose weights are in scratch.scores, to the output of
// a tile. Where pairs are hidden, the new output is summed beside the old one: if a value that is
// not finite spoils it, it is summed again without the hidden pairs.
template <class P>
void add_values(const Problem& p, int64_t key, int64_t keys, ForwardScratch<P>& s,
                ForwardState<P>& state) {
  using T = Compute<typename P::Element>;
  const Tile& tile = state.tile;
  if (!hides_any(p) || !hides_pairs(p, tile, key, touched_keys(keys, P::kKeyMultiple)))
    return s.products.add_values(tile, key, keys, s.scores, s.rescale, state.output, state.output);
  T* const before = state.output;
  state.output = s.spare, s.spare = before;
  if (s.saw_nonfinite && !s.products.values_are_parted()) s.products.part_values();
  const bool expects_none = !s.products.values_are_parted();
  if (expects_none) {
    s.products.add_values(tile, key, keys, s.scores, s.rescale, before, state.output);
    if (!s.products.is_spoilt(tile, state.output) || s.products.part_values()) return;
    s.saw_nonfinite = true;
  }
  if (s.products.hides_nonfinite(tile, key, keys, s.scores))
    s.products.add_visible_values(tile, key, keys, s.scores, s.rescale, before, state.output);
  else if (!expects_none)
    s.products.add_values(tile, key, keys, s.scores, s.rescale, before, state.output);
}

// Scores, weights and output of one tile of queries for keys [key, key + keys).
template <class P>
void attend(const Problem& p, int64_t key, int64_t keys, ForwardScratch<P>& scratch,
            ForwardState<P>& state) {
  using T = Compute<typename P::Element>;
  T* scores = scratch.scores;
  scratch.products.scores(state.tile, key, keys, state.query, scores);
  apply_score_options<T>(p, state.tile, key, keys, scores, nullptr);
  (state.tile.lanes == kLanes<T> ? softmax_tile<T, 1> : softmax_tile<T, 2>)(keys, scores, state.max,
                                                                            state.sum,
                                                                            scratch.rescale);
  if (p.dropout_p > 0) drop_weights(p, scratch.dropout, state.tile, key, keys, scores);
  add_values(p, key, keys, scratch, state);
}

// out [lanes] = the log-sum-exps of a tile, -inf for rows that have seen no key. They are computed
// in double, because a logarithm that is rounded twice would show in the gradients.
template <class P, class T = Compute<typename P::Element>>
void log_sum_exp(const ForwardState<P>& state, double* out) {
  constexpr int W = kLanes<T>;
  for (int v = 0; v < state.tile.lanes; v += W) {
    const Reference<T> reference(load(state.max + v));
    constexpr int N = W / kLanes<double>;
    double sums[W];
    QKV_UNROLL
    for (int i = 0; i < W; ++i) sums[i] = state.sum[v + i];
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

// Divides the output of a tile by the sum of its weights and writes it.
template <class P>
void finish_tile(const Problem& p, const ForwardResult& result, const ForwardBlock& block,
                 const ForwardScratch<P>& scratch, const ForwardState<P>& state) {
  using E = typename P::Element;
  using T = Compute<E>;
  const Tile& tile = state.tile;
  for (int v = 0; v < tile.lanes; v += kLanes<T>) {
    const Vec<T> sum = load(state.sum + v);
    store(scratch.rescale + v, sum == 0 ? Vec<T>{} : T(dropout_scale(p.dropout_p)) / sum);
  }
  const T* rows = scratch.products.output_rows(tile, scratch.rescale, state.output, scratch.rows);
  double log_sum[kRowBlock<T>];
  log_sum_exp(state, log_sum);

  if (block.partial_output)
    return write_tile(p, tile, tile.row - block.row_begin, rows, log_sum,
                      Rows<T>{static_cast<T*>(block.partial_output), 1, 0, p.head_dim_v, 1},
                      Rows<T>{static_cast<T*>(block.partial_lse), 1, 0, 1, 1});
  write_tile(p, tile, tile.row, rows, log_sum,
             rows_of<E>(p, result.output, tile.batch, tile.kv_head),
             rows_of<T>(p, result.lse, tile.batch, tile.kv_head));
}

template <class P>
void forward_by(const Problem& p, const ForwardResult& result, const ForwardBlock& block,
                void* workspace) {
  using T = Compute<typename P::Element>;
  Arena arena(workspace);
  ForwardScratch<P> scratch(arena, p, block.row_end - block.row_begin);

  const bool with_sink = p.sinks.data && block.key_begin == 0;
  int64_t tiles = 0;
  for (int64_t row = block.row_begin; row < block.row_end; row += kRowBlock<T>, ++tiles)
    begin_tile(p, make_tile<T>(p, block.batch, block.kv_head, row, block.row_end), with_sink,
               scratch.products, scratch.tiles[tiles]);
  // The loop over keys is outside and the loop over tiles inside, so that a block of keys and
  // values is read from memory once and serves every tile. Where blocks begin does not depend on
  // the tiles.
  const int64_t step = P::block_keys(block.key_end - block.key_begin);
  const int64_t last = std::min(block.key_end, scratch.tiles[tiles - 1].tile.key_end);
  int64_t key = block.key_begin;
  key += std::max<int64_t>(0, scratch.tiles[0].tile.key_begin - key) / step * step;
  for (; key < last; key += step) {
    const int64_t end = std::min(key + step, last);
    scratch.products.load_keys(block.batch, block.kv_head, key, end - key);
    scratch.products.load_values(block.batch, block.kv_head, key, end - key);
    for (int64_t t = 0; t < tiles; ++t) {
      const Tile& tile = scratch.tiles[t].tile;
      constexpr int64_t kMultiple = P::kKeyMultiple;
      const int64_t skip = std::max<int64_t>(0, tile.key_begin - key) / kMultiple * kMultiple;
      const int64_t begin = key + skip, keys = std::min(end, tile.key_end) - begin;
      if (keys > 0) attend(p, begin, keys, scratch, scratch.tiles[t]);
    }
  }
  for (int64_t t = 0; t < tiles; ++t) finish_tile(p, result, block, scratch, scratch.tiles[t]);
}

template <class E>
void forward(const Problem& p, const ForwardResult& result, const ForwardBlock& block,
             void* workspace) {
  (has_few_rows<E>(p) ? forward_by<ForwardFewRows<E>>
                      : forward_by<ForwardTiles<E>>)(p, result, block, workspace);
}

}  // namespace qkv::QKV_ISA
