// The backward pass over one BackwardBlock. With P the weights and
// dP = dO V^T, dS = P * (dP - delta):
//
//   S^T = K Q^T    dP^T = V dO^T    dQ^T += K^T dS^T    dV += P^T dO    dK += dS^T Q
//
// Rows outside, keys inside: a block of rows is packed once and finished in one
// go, while dK and dV of the item's keys accumulate in the second-level cache.
namespace qkv::QKV_ISA {

// Zero weights for keys [from, to) of a tile.
template <class T>
void clear_keys(const Tile& tile, int64_t from, int64_t to, T* weights, T* grad_scores) {
  for (int64_t j = from; j < to; ++j) {
    std::fill_n(weights + j * tile.step, tile.lanes, T(0));
    std::fill_n(grad_scores + j * tile.step, tile.lanes, T(0));
  }
}

template <class T>
struct BackwardTile {
  Tile tile;
  int64_t lane;  // its first column in the tiles of scores
};

// S, dP, P, dS and dQ of one tile of rows and keys [key, key + keys).
template <class T>
void grad_tile(const Problem& p, const BackwardArgs& a, const BackwardTile<T>& t, const T* key_rows,
               const T* value_rows, int64_t key, int64_t keys, const BackwardScratch<T>& s) {
  const Strides& k = p.key.strides;
  const Strides& v = p.value.strides;
  const int64_t lanes = t.tile.lanes;
  T* weights = s.weights + t.lane;
  T* grad_scores = s.grad_scores + t.lane;
  gemm<T>(keys, lanes,
          {p.head_dim, key_rows, k.row, k.col, s.query_t + t.lane * padded<T>(p.head_dim), lanes,
           weights, kGradRows, Beta::zero, nullptr});
  apply_score_options(p, t.tile, key, keys, s.mask, weights);
  gemm<T>(
      keys, lanes,
      {p.head_dim_v, value_rows, v.row, v.col, s.grad_output_t + t.lane * padded<T>(p.head_dim_v),
       lanes, grad_scores, kGradRows, Beta::zero, nullptr});
  (may_leak(p) ? grad_softmax<T, true> : grad_softmax<T, false>)(t.tile, t.lane, keys, s);
  if (a.grad_query.data)
    gemm<T>(p.head_dim, lanes,
            {keys, key_rows, k.col, k.row, grad_scores, kGradRows,
             s.grad_query_t + t.lane * padded<T>(p.head_dim), lanes, Beta::one, nullptr});
}

// One block of rows against all keys of the item.
template <class T>
void backward_rows(const Problem& p, const BackwardArgs& a, const BackwardBlock& block, int64_t row,
                   int64_t rows, const BackwardScratch<T>& s) {
  const int64_t dim = padded<T>(p.head_dim), dim_v = padded<T>(p.head_dim_v);
  const T* keys_of_head = plane<T>(p, p.key, block.batch, block.kv_head);
  const T* values_of_head = plane<T>(p, p.value, block.batch, block.kv_head);
  pack_grad_rows(p, a, block, row, rows, s);

  BackwardTile<T> tiles[kGradRows / kRowBlock<T>];
  int count = 0;
  for (int64_t lane = 0; lane < rows; lane += kRowBlock<T>, ++count) {
    tiles[count] = {make_tile<T>(p, block.batch, block.kv_head, row + lane, row + rows, kGradRows),
                    lane};
    const int64_t lanes = tiles[count].tile.lanes;
    transpose<T>(s.query + lane * dim, dim, s.query_t + lane * dim, lanes, lanes, dim, T(p.scale));
    transpose<T>(s.grad_output + lane * dim_v, dim_v, s.grad_output_t + lane * dim_v, lanes, lanes,
                 dim_v, T(1));
  }
  std::fill_n(s.grad_query_t, padded<T>(rows) * dim, T(0));

  const int64_t key_end = std::min(block.key_end, visible_keys(p, tiles[count - 1].tile.last));
  const int64_t step = key_step(block.key_end - block.key_begin);
  for (int64_t key = block.key_begin; key < key_end; key += step) {
    const int64_t keys = std::min(step, key_end - key);
    const T* key_rows = keys_of_head + key * p.key.strides.row;
    const T* value_rows = values_of_head + key * p.value.strides.row;
    int64_t first = rows;  // the first row that sees any of these keys
    for (int t = count - 1; t >= 0; --t) {
      const int64_t seen = std::min(keys, visible_keys(p, tiles[t].tile.last) - key);
      if (seen <= 0) break;
      first = tiles[t].lane;
      grad_tile(p, a, tiles[t], key_rows, value_rows, key, seen, s);
      clear_keys(tiles[t].tile, seen, keys, s.weights + first, s.grad_scores + first);
    }
    const int64_t at = key - block.key_begin, depth = rows - first;
    if (a.grad_value.data)
      gemm<T>(keys, dim_v,
              {depth, s.weights + first, kGradRows, 1, s.grad_output + first * dim_v, dim_v,
               s.grad_value + at * dim_v, dim_v, Beta::one, nullptr});
    if (a.grad_key.data)
      gemm<T>(keys, dim,
              {depth, s.grad_scores + first, kGradRows, 1, s.query + first * dim, dim,
               s.grad_key + at * dim, dim, Beta::one, nullptr});
  }
  if (!a.grad_query.data) return;

  const Rows<T> grad_query =
      block.partial_grad_query
          ? Rows<T>{static_cast<T*>(block.partial_grad_query), 1, 0, p.head_dim, 1}
          : rows_of<T>(p, a.grad_query, block.batch, block.kv_head);
  for (int t = 0; t < count; ++t) {
    const int64_t lane = tiles[t].lane, lanes = tiles[t].tile.lanes;
    T* natural = s.query;  // free by now
    transpose<T>(s.grad_query_t + lane * dim, lanes, natural, dim, dim, lanes, T(p.scale));
    for (int r = 0; r < tiles[t].tile.rows; ++r)
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
void backward(const Problem& p, const BackwardArgs& a, const BackwardBlock& block,
              void* workspace) {
  Arena arena(workspace);
  const int64_t keys = block.key_end - block.key_begin;
  const BackwardScratch<T> s(arena, p, keys);
  std::fill_n(s.grad_key, keys * padded<T>(p.head_dim), T(0));
  std::fill_n(s.grad_value, keys * padded<T>(p.head_dim_v), T(0));
  const int64_t rows = p.group() * p.seqlen_q;
  for (int64_t row = grad_row_begin(p, block.key_begin); row < rows; row += kGradRows)
    backward_rows(p, a, block, row, std::min(kGradRows, rows - row), s);
  if (a.grad_key.data || a.grad_value.data) finish_grad_key_value(p, a, block, s);
}

template <class T>
void finish_grad_query(const Problem& p, const BackwardArgs& a, const GradQueryRows& rows) {
  const Rows<T> grad_query = rows_of<T>(p, a.grad_query, rows.batch, rows.kv_head);
  const T* partial = static_cast<const T*>(rows.partial_grad_query);
  const int64_t total = p.group() * p.seqlen_q;
  for (int64_t r = rows.row_begin; r < rows.row_end; ++r) {
    T* to = grad_query[r];
    for (int64_t part = 0; part < rows.parts; ++part)
      if (r >= grad_row_begin(p, (part + 1) * rows.split_keys))
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
  BackwardScratch<T>(arena, p, keys);
  return arena.used();
}

}  // namespace qkv::QKV_ISA
