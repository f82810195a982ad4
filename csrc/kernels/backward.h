// The backward pass over one BackwardBlock. With P the weights and
// dP = dO V^T, dS = P * (dP - delta):
//
//   S^T = K Q^T    dP^T = V dO^T    dQ^T += K^T dS^T    dV += P^T dO    dK += dS^T Q
//
// Rows outside, keys inside: a block of rows is packed once and finished in one
// go, while dK and dV of the item's keys accumulate in the second-level cache.
namespace qkv::QKV_ISA {

template <class T>
struct BackwardTile {
  Tile tile;
  int64_t lane;  // its first column in the tiles of scores
};

// Scores and dP to P and dS.
template <class T>
void weights_and_gradients(const Problem& p, const BackwardTile<T>& t, int64_t key, int64_t keys,
                           T* weights, T* grad_scores, const BackwardScratch<T>& s) {
  (may_leak(p) ? grad_softmax<T, true> : grad_softmax<T, false>)(t.tile, t.lane, keys, weights,
                                                                 grad_scores, s);
  if (p.dropout_p > 0)
    drop_weights_backward(p, s.dropout, t.tile, key, keys, s.delta + t.lane, weights, grad_scores);
}

// Scores, dP, P and dS of one tile of rows and keys [key, key + keys); `at` is
// where the tile begins in the scratch tiles.
template <class T>
void grad_scores_of_tile(const Problem& p, const BackwardArgs& a, const BackwardTile<T>& t,
                         int64_t key, int64_t keys, int64_t at, const BackwardScratch<T>& s) {
  const Strides& k = p.key.strides;
  const Strides& v = p.value.strides;
  const T* key_rows = s.keys + key * k.row;
  const int64_t lanes = t.tile.lanes;
  T *weights = s.weights + at, *grad_scores = s.grad_scores + at;
  gemm<T>(keys, lanes,
          {p.head_dim, key_rows, k.row, k.col, s.query_t + t.lane * padded<T>(p.head_dim), lanes,
           weights, kGradRows, Beta::zero, nullptr});
  apply_score_options(p, t.tile, key, keys, weights, s.cap_slope ? s.cap_slope + at : nullptr);
  gemm<T>(keys, lanes,
          {a.grad_output.data ? p.head_dim_v : 0, s.values + key * v.row, v.row, v.col,
           s.grad_output_t + t.lane * padded<T>(p.head_dim_v), lanes, grad_scores, kGradRows,
           Beta::zero, nullptr});
  if (a.grad_weights.data) {
    const T factor = T(dropout_scale(p.dropout_p));
    read_tile<T>(rows_of<T>(p, a.grad_weights, t.tile.batch, t.tile.kv_head), t.tile, key, keys,
                 [&](int64_t j, int v, Vec<T> grad) {
                   T* to = grad_scores + j * kGradRows + v;
                   store(to, load(to) + grad * factor);
                 });
  }
  if (may_leak(p) && !s.rows_are_finite(t.lane, t.tile.rows)) {
    const HiddenPairs<T> hidden(p, t.tile, key, keys, weights, s.factor + t.lane, s.delta + t.lane);
    weights_and_gradients(p, t, key, keys, weights, grad_scores, s);
    hidden.clear(weights);
    hidden.clear(grad_scores);
  } else {
    weights_and_gradients(p, t, key, keys, weights, grad_scores, s);
  }
}

// What is made of them beside dK and dV.
template <class T>
void grad_tile(const Problem& p, const BackwardArgs& a, const BackwardBlock& block,
               const BackwardTile<T>& t, int64_t key, int64_t keys, int64_t at,
               const BackwardScratch<T>& s) {
  const Tile& tile = t.tile;
  T* grad_scores = s.grad_scores + at;
  grad_scores_of_tile(p, a, t, key, keys, at, s);
  if (a.weights.data)
    add_tile<T>(rows_of<T>(p, a.weights, tile.batch, tile.kv_head), tile, key, keys, s.weights + at,
                T(dropout_scale(p.dropout_p)));
  if (a.grad_mask.data) add_grad_mask(p, a.grad_mask, tile, key, keys, grad_scores);
  if (a.grad_mask_keys.data)
    add_key_sums(p, tile, keys, grad_scores,
                 s.key_sums + (key - block.key_begin) * p.group() * kLanes<T>);
  if (block.grad_mask_rows) add_row_sums(tile, keys, grad_scores, block.grad_mask_rows + tile.row);
  if (block.grad_slopes) add_grad_slopes(p, tile, key, keys, grad_scores, block.grad_slopes);
  if (p.softcap > 0) softcap_backward(tile, keys, s.cap_slope + at, grad_scores);
  if (!a.grad_query.data) return;
  const Strides& k = p.key.strides;
  const T* key_rows = s.keys + key * k.row;
  gemm<T>(p.head_dim, tile.lanes,
          {keys, key_rows, k.col, k.row, grad_scores, kGradRows,
           s.grad_query_t + t.lane * padded<T>(p.head_dim), tile.lanes, Beta::one, nullptr});
}

// A block of rows, packed, and its tiles.
template <class T>
struct RowBlock {
  int64_t row, rows;
  BackwardTile<T> tiles[kGradRows / kRowBlock<T>];
  int count = 0;

  RowBlock(const Problem& p, const BackwardArgs& a, int64_t batch, int64_t kv_head,
           int64_t row_begin, int64_t row_count, const BackwardScratch<T>& s)
      : row(row_begin), rows(row_count) {
    const int64_t dim = padded<T>(p.head_dim), dim_v = padded<T>(p.head_dim_v);
    pack_grad_rows(p, a, batch, kv_head, row, rows, s);
    for (int64_t lane = 0; lane < rows; lane += kRowBlock<T>, ++count) {
      tiles[count] = {make_tile<T>(p, batch, kv_head, row + lane, row + rows, kGradRows), lane};
      const int64_t lanes = tiles[count].tile.lanes;
      transpose<T>(s.query + lane * dim, dim, s.query_t + lane * dim, lanes, lanes, dim,
                   T(p.scale));
      transpose<T>(s.grad_output + lane * dim_v, dim_v, s.grad_output_t + lane * dim_v, lanes,
                   lanes, dim_v, T(1));
    }
  }

  const Tile& first() const { return tiles[0].tile; }
  const Tile& last() const { return tiles[count - 1].tile; }
};

// Zero weights for keys [from, to) of a tile.
template <class T>
void clear_keys(const BackwardTile<T>& t, int64_t from, int64_t to, const BackwardScratch<T>& s) {
  for (int64_t j = from; j < to; ++j) {
    std::fill_n(s.weights + j * kGradRows + t.lane, t.tile.lanes, T(0));
    std::fill_n(s.grad_scores + j * kGradRows + t.lane, t.tile.lanes, T(0));
  }
}

// One block of rows against keys [key, key + keys), at most a tile of them.
template <class T>
void backward_keys(const Problem& p, const BackwardArgs& a, const BackwardBlock& block,
                   const RowBlock<T>& rows, int64_t key, int64_t keys,
                   const BackwardScratch<T>& s) {
  // Tiles [first, last] see some of these keys, and those are [begin, end).
  const auto begin_of = [&](int t) { return std::max(key, rows.tiles[t].tile.key_begin); };
  const auto end_of = [&](int t) { return std::min(key + keys, rows.tiles[t].tile.key_end); };
  int first = 0, last = rows.count - 1;
  while (first <= last && begin_of(first) >= end_of(first)) ++first;
  while (first <= last && begin_of(last) >= end_of(last)) --last;
  if (first > last) return;
  const int64_t begin = begin_of(first), end = end_of(last);
  for (int t = first; t <= last; ++t) {
    const BackwardTile<T>& tile = rows.tiles[t];
    const int64_t from = begin_of(t), to = std::max(from, end_of(t));
    if (from < to)
      grad_tile(p, a, block, tile, from, to - from, (from - begin) * kGradRows + tile.lane, s);
    clear_keys(tile, 0, from - begin, s);
    clear_keys(tile, to - begin, end - begin, s);
  }
  const int64_t lane = rows.tiles[first].lane, at = begin - block.key_begin;
  const int64_t depth = rows.tiles[last].lane + rows.tiles[last].tile.rows - lane;
  const int64_t dim = padded<T>(p.head_dim), dim_v = padded<T>(p.head_dim_v);
  if (a.grad_value.data)
    gemm<T>(end - begin, dim_v,
            {depth, s.weights + lane, kGradRows, 1, s.grad_output + lane * dim_v, dim_v,
             s.grad_value + at * dim_v, dim_v, Beta::one, nullptr});
  if (a.grad_key.data)
    gemm<T>(end - begin, dim,
            {depth, s.grad_scores + lane, kGradRows, 1, s.query + lane * dim, dim,
             s.grad_key + at * dim, dim, Beta::one, nullptr});
}

// One block of rows against all keys of the item.
template <class T>
void backward_rows(const Problem& p, const BackwardArgs& a, const BackwardBlock& block, int64_t row,
                   int64_t count, const Rows<T>& grad_query, const BackwardScratch<T>& s) {
  const int64_t dim = padded<T>(p.head_dim);
  const RowBlock<T> rows(p, a, block.batch, block.kv_head, row, count, s);
  std::fill_n(s.grad_query_t, padded<T>(count) * dim, T(0));

  const int64_t key_end = std::min(block.key_end, rows.last().key_end);
  const int64_t step = key_step(block.key_end - block.key_begin);
  int64_t key = block.key_begin;
  key += std::max<int64_t>(0, rows.first().key_begin - key) / step * step;
  for (; key < key_end; key += step)
    backward_keys(p, a, block, rows, key, std::min(step, key_end - key), s);

  if (!grad_query.data) return;
  for (int t = 0; t < rows.count; ++t) {
    const int64_t lane = rows.tiles[t].lane, lanes = rows.tiles[t].tile.lanes;
    T* natural = s.query;  // free by now
    transpose<T>(s.grad_query_t + lane * dim, lanes, natural, dim, dim, lanes, T(p.scale));
    for (int r = 0; r < rows.tiles[t].tile.rows; ++r)
      scatter_row(natural + r * dim, block.accumulate, p.head_dim, grad_query[row + lane + r],
                  grad_query.col);
  }
}

template <class T>
void finish_grad_key_value(const Problem& p, const BackwardArgs& a, const BackwardBlock& block,
                           const BackwardScratch<T>& s) {
  const int64_t dim = padded<T>(p.head_dim), dim_v = padded<T>(p.head_dim_v);
  T* grad_key = plane<T>(p, a.grad_key, block.batch, block.kv_head);
  T* grad_value = plane<T>(p, a.grad_value, block.batch, block.kv_head);
  const Strides& k = a.grad_key.strides;
  const Strides& v = a.grad_value.strides;
  for (int64_t j = 0; j < block.key_end - block.key_begin; ++j) {
    const int64_t key = block.key_begin + j;
    T* from_key = s.grad_key + j * dim;
    T* from_value = s.grad_value + j * dim_v;
    for (int64_t d = 0; d < dim; d += kLanes<T>)
      store(from_key + d, load(from_key + d) * T(p.scale));
    if (grad_key) scatter_row(from_key, false, p.head_dim, grad_key + key * k.row, k.col);
    if (grad_value) scatter_row(from_value, false, p.head_dim_v, grad_value + key * v.row, v.col);
    if (may_leak(p) && (nonfinite(from_key, p.head_dim) || nonfinite(from_value, p.head_dim_v)))
      repair_grad_key_value(p, a, block.batch, block.kv_head, key);
  }
}

template <class T>
void finish_grad_mask_keys(const Problem& p, const BackwardArgs& a, const BackwardBlock& block,
                           const BackwardScratch<T>& s) {
  const T* sums = s.key_sums;
  for (int64_t key = block.key_begin; key < block.key_end; ++key)
    for (int64_t g = 0; g < p.group(); ++g, sums += kLanes<T>)
      plane<T>(p, a.grad_mask_keys, block.batch,
               block.kv_head * p.group() + g)[key * a.grad_mask_keys.strides.col] = *sums;
}

template <class T>
void backward(const Problem& p, const BackwardArgs& a, const BackwardBlock& block,
              void* workspace) {
  Arena arena(workspace);
  const int64_t keys = block.key_end - block.key_begin;
  const BackwardScratch<T> s(arena, p, block.batch, block.kv_head, keys);
  std::fill_n(s.grad_key, keys * padded<T>(p.head_dim), T(0));
  std::fill_n(s.grad_value, keys * padded<T>(p.head_dim_v), T(0));
  if (a.grad_mask_keys.data) std::fill_n(s.key_sums, keys * p.group() * kLanes<T>, T(0));
  if (block.grad_slopes) std::fill_n(block.grad_slopes, p.group(), 0.);
  if (block.grad_mask_rows) std::fill_n(block.grad_mask_rows, p.group() * p.seqlen_q, 0.);

  const Rows<T> grad_query =
      block.partial_grad_query
          ? Rows<T>{static_cast<T*>(block.partial_grad_query), 1, 0, p.head_dim, 1}
          : rows_of<T>(p, a.grad_query, block.batch, block.kv_head);
  const int64_t end = grad_row_end(p, block.key_end);
  const int64_t begin = std::min(grad_row_begin(p, block.key_begin), end);
  for (int64_t row = begin; row < end; row += kGradRows)
    backward_rows(p, a, block, row, std::min(kGradRows, end - row), grad_query, s);
  if (grad_query.data && !block.partial_grad_query && !block.accumulate) {
    clear_rows(grad_query, 0, begin, p.head_dim);
    clear_rows(grad_query, end, p.group() * p.seqlen_q, p.head_dim);
  }
  if (a.grad_key.data || a.grad_value.data) finish_grad_key_value(p, a, block, s);
  if (a.grad_mask_keys.data) finish_grad_mask_keys(p, a, block, s);
}

template <class T>
void finish_grad_query(const Problem& p, const BackwardArgs& a, const GradQueryRows& rows) {
  const Rows<T> grad_query = rows_of<T>(p, a.grad_query, rows.batch, rows.kv_head);
  const T* partial = static_cast<const T*>(rows.partial_grad_query);
  const int64_t total = p.group() * p.seqlen_q;
  for (int64_t r = rows.row_begin; r < rows.row_end; ++r) {
    T* to = grad_query[r];
    for (int64_t part = 0; part < rows.parts; ++part)
      if (r >= grad_row_begin(p, (part + 1) * rows.split_keys) &&
          r < grad_row_end(p, std::min(p.seqlen_k, (part + 2) * rows.split_keys)))
        scatter_row(partial + (part * total + r) * p.head_dim, true, p.head_dim, to,
                    grad_query.col);
    if (!may_leak(p)) continue;
    T sum = 0;
    if (grad_query.col != 1)
      for (int64_t d = 0; d < p.head_dim; ++d) sum += to[d * grad_query.col] * T(0);
    if (grad_query.col == 1 ? nonfinite(to, p.head_dim) : !(sum == 0))
      repair_grad_query(p, a, rows.batch, rows.kv_head, r);
  }
}

template <class T>
size_t backward_workspace(const Problem& p, int64_t keys) {
  Arena arena(nullptr);
  BackwardScratch<T>(arena, p, 0, 0, keys);
  return arena.used();
}

}  // namespace qkv::QKV_ISA
