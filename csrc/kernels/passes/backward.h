// The backward pass over one BackwardBlock: a range of keys of one plane against all rows that may
// see one. With P the weights, dP = dO V^T and delta as in grad_rows.h, the gradient of the scores
// is dS = P * (dP - delta), and there are five products:
//
//   S^T = K Q^T    dP^T = V dO^T    dQ^T += K^T dS^T    dV += P^T dO    dK += dS^T Q
//
// The loop over rows is outside and the loop over keys inside: a block of rows is packed once and
// finished in one go, while dK and dV of the item's keys are summed in the second-level cache.
namespace qkv::QKV_ISA {

// Turns scores and dP [keys x lanes] into P and dS, in place.
template <class E, class T = Compute<E>>
void weights_and_gradients(const Problem& p, const BackwardTile<E>& t, int64_t key, int64_t keys,
                           T* weights, T* grad_scores, const BackwardScratch<E>& s) {
  const bool hides = s.hides_pairs && !s.needs_marks;
  (hides ? grad_softmax<true, E> : grad_softmax<false, E>)(t.tile, t.lane, keys, weights,
                                                           grad_scores, s);
  if (p.dropout_p > 0)
    drop_weights_backward(p, s.dropout, t.tile, key, keys, s.delta + t.lane, weights, grad_scores);
}

// scores [keys x lanes] = the scores of keys [key, key + keys), before any option, made as the
// forward pass makes them.
template <class E, class T = Compute<E>>
void scores_of_tile(const Problem& p, const BackwardTile<E>& t, int64_t key, int64_t keys,
                    T* scores, const BackwardScratch<E>& s) {
  if (s.few_query)
    few_scores<E>(t.tile, p.head_dim, keys, s.key_rows.at(key), s.key_rows.row(), s.few_query,
                  scores, {});
  else
    multiply_rows(t.tile, s.keys.rows(key, keys), t.query, scores);
}

// Computes P and dS of one tile of rows and keys [key, key + keys) into s.weights and
// s.grad_scores, where the tile begins at element `at`.
template <class E>
void grad_scores_of_tile(const Problem& p, const BackwardArgs& a, const BackwardTile<E>& t,
                         int64_t key, int64_t keys, int64_t at, const BackwardScratch<E>& s) {
  using T = Compute<E>;
  T *weights = s.weights + at, *grad_scores = s.grad_scores + at;
  scores_of_tile(p, t, key, keys, weights, s);
  apply_score_options(p, t.tile, key, keys, weights, s.cap_slope ? s.cap_slope + at : nullptr);
  multiply_rows(t.tile, s.values.rows(key, keys), t.grad_output, grad_scores);
  if (a.grad_weights.data) {
    const T factor = T(dropout_scale(p.dropout_p));
    read_tile<T>(rows_of<T>(p, a.grad_weights, t.tile.batch, t.tile.kv_head), t.tile, key, keys,
                 [&](int64_t j, int v, Vec<T> grad) {
                   T* to = grad_scores + j * kGradRows + v;
                   store(to, load(to) + grad * factor);
                 });
  }
  weights_and_gradients(p, t, key, keys, weights, grad_scores, s);
  if (!s.needs_marks) return;
  mark_pairs<T, 2>(p, t.tile, key, keys, weights, t.tile.step, s.marks + at,
                   {weights, grad_scores});
}

// Computes P and dS of one tile and everything that is made of them but dK and dV: the weights, the
// gradients of masks and slopes, and dQ.
template <class E>
void grad_tile(const Problem& p, const BackwardArgs& a, const BackwardBlock& block,
               const BackwardTile<E>& t, int64_t key, int64_t keys, int64_t at,
               BackwardScratch<E>& s) {
  using T = Compute<E>;
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
  // A dQ that is NaN all over is left alone, since nothing changes it any more. The same goes for
  // dK and dV in add_grad_key_value.
  const bool grads_query =
      a.grad_query.data && !(s.needs_marks && all_nan(t.grad_query, p.head_dim * tile.lanes));
  const bool hides_nonfinite = s.hides_pairs && (grads_query || p.softcap > 0) &&
                               s.hides_nonfinite(p, tile, key, keys, s.weights + at);
  if (p.softcap > 0) {
    softcap_backward(tile, keys, s.cap_slope + at, grad_scores);
    if (hides_nonfinite || s.needs_marks)
      mark_pairs<T, 1>(p, tile, key, keys, s.weights + at, tile.step, s.marks + at, {grad_scores});
  }
  if (!grads_query) return;
  add_over_keys(tile,
                hides_nonfinite ? s.nonfinite_keys->finite(key, keys) : s.keys.columns(key, keys),
                keys, s.as_b, grad_scores, s.sees_few, t.grad_query);
  if (hides_nonfinite) s.nonfinite_keys->add(tile, t.grad_query);
}

// A block of up to kGradRows rows, packed, and the tiles it consists of.
template <class E, class T = Compute<E>>
struct RowBlock {
  int64_t row, rows;
  BackwardTile<E> tiles[kGradRows / kRowBlock<T>];
  int count = 0;

  RowBlock(const Problem& p, const BackwardArgs& a, int64_t batch, int64_t kv_head,
           int64_t row_begin, int64_t row_count, BackwardScratch<E>& s)
      : row(row_begin), rows(row_count) {
    load_statistics(p, a, batch, kv_head, row, rows, s);
    s.load_rows(p, a, batch, kv_head, row, rows);
    for (int64_t lane = 0; lane < rows; lane += kRowBlock<T>, ++count)
      s.pack(p, make_tile<T>(p, batch, kv_head, row + lane, row + rows, kGradRows), lane,
             tiles[count]);
  }

  const Tile& first() const { return tiles[0].tile; }
  const Tile& last() const { return tiles[count - 1].tile; }
};

// Sets P and dS of keys [from, to) of a tile to 0.
template <class E>
void clear_keys(const BackwardTile<E>& t, int64_t from, int64_t to, const BackwardScratch<E>& s) {
  using T = Compute<E>;
  for (int64_t j = from; j < to; ++j) {
    std::fill_n(s.weights + j * kGradRows + t.lane, t.tile.lanes, T(0));
    std::fill_n(s.grad_scores + j * kGradRows + t.lane, t.tile.lanes, T(0));
    if (s.needs_marks) std::fill_n(s.marks + j * kGradRows + t.lane, t.tile.lanes, T(0));
  }
}

// Adds to dK [keys, padded(D)] and dV [keys, padded(Dv)] what rows [lane, lane + depth) of the
// block contribute, from P and dS in the scratch memory.
template <class E, class T = Compute<E>>
void add_grad_key_value(const Problem& p, const BackwardArgs& a, int64_t lane, int64_t depth,
                        int64_t keys, T* grad_key, T* grad_value, const BackwardScratch<E>& s) {
  const T *weights = s.weights + lane, *grad_scores = s.grad_scores + lane, *marks = s.marks + lane;
  const auto add = [&](const Output& grad, const RowOperand<E>& operand, const T* tiles,
                       const auto& nonfinite, int64_t dim, T* sums) {
    if (!grad.data || (s.needs_marks && all_nan(sums, keys * padded<T>(dim)))) return;
    add_over_rows(keys, s.as_a, tiles, depth, operand.rows(lane), dim, s.sees_few, sums);
    if (s.needs_marks) nonfinite->add(lane, depth, keys, marks, sums);
  };
  if (s.has_grad_output)
    add(a.grad_value, s.grad_output, weights, s.nonfinite_grad_output, p.head_dim_v, grad_value);
  add(a.grad_key, s.query, grad_scores, s.nonfinite_query, p.head_dim, grad_key);
}

// One block of rows against keys [key, key + keys), which are no more than a tile has.
template <class E>
void backward_keys(const Problem& p, const BackwardArgs& a, const BackwardBlock& block,
                   const RowBlock<E>& rows, int64_t key, int64_t keys, BackwardScratch<E>& s) {
  using T = Compute<E>;
  // Only tiles [first, last] see some of these keys, and all that they see are keys [begin, end).
  const auto begin_of = [&](int t) {
    constexpr int64_t kMultiple = kDepthMultiple<E>;  // where operand K^T of a tile may begin
    const int64_t skip = std::max<int64_t>(0, rows.tiles[t].tile.key_begin - key);
    return key + skip / kMultiple * kMultiple;
  };
  const auto end_of = [&](int t) { return std::min(key + keys, rows.tiles[t].tile.key_end); };
  int first = 0, last = rows.count - 1;
  while (first <= last && begin_of(first) >= end_of(first)) ++first;
  while (first <= last && begin_of(last) >= end_of(last)) --last;
  if (first > last) return;
  const int64_t begin = begin_of(first), end = end_of(last);
  for (int t = first; t <= last; ++t) {
    const BackwardTile<E>& tile = rows.tiles[t];
    const int64_t from = begin_of(t), to = std::max(from, end_of(t));
    if (from < to)
      grad_tile(p, a, block, tile, from, to - from, (from - begin) * kGradRows + tile.lane, s);
    clear_keys(tile, 0, from - begin, s);
    clear_keys(tile, to - begin, end - begin, s);
  }
  const int64_t lane = rows.tiles[first].lane, at = begin - block.key_begin;
  const int64_t depth = rows.tiles[last].lane + rows.tiles[last].tile.rows - lane;
  add_grad_key_value(p, a, lane, depth, end - begin, s.grad_key + at * padded<T>(p.head_dim),
                     s.grad_value + at * padded<T>(p.head_dim_v), s);
}

// Sets s.hides_pairs, whether pairs of these rows and keys [key, key_end) are hidden, and
// s.needs_marks, whether something in the rows is not finite and could leak through such pairs.
// Whether keys are finite is looked at tile by tile, in grad_tile.
template <class E>
void look_for_nonfinite(const Problem& p, const RowBlock<E>& rows, int64_t key, int64_t key_end,
                        BackwardScratch<E>& s) {
  s.hides_pairs = p.mask_type != MaskType::none ||
                  hides_positions(p, rows.first().first, rows.last().last, key, key_end);
  s.needs_marks = false;
  if (!s.hides_pairs) return;
  const bool rows_are_finite = s.part_rows(rows.rows);
  s.needs_marks = !rows_are_finite || !s.statistics_are_finite(rows.rows);
}

// One block of rows against all keys of the item. grad_query goes to the user's tensor, with G = E,
// or is a part of one split, with G the compute type.
template <class E, class G>
void backward_rows(const Problem& p, const BackwardArgs& a, const BackwardBlock& block, int64_t row,
                   int64_t count, const Rows<G>& grad_query, BackwardScratch<E>& s) {
  using T = Compute<E>;
  const RowBlock<E> rows(p, a, block.batch, block.kv_head, row, count, s);
  look_for_nonfinite(p, rows, block.key_begin, block.key_end, s);
  const int64_t key_end = std::min(block.key_end, rows.last().key_end);
  const int64_t step = key_step(block.key_end - block.key_begin);
  int64_t key = block.key_begin;
  key += std::max<int64_t>(0, rows.first().key_begin - key) / step * step;
  for (; key < key_end; key += step)
    backward_keys(p, a, block, rows, key, std::min(step, key_end - key), s);

  if (!grad_query.data) return;
  const int64_t dim = padded<T>(p.head_dim);
  for (int t = 0; t < rows.count; ++t) {
    const BackwardTile<E>& of = rows.tiles[t];
    transpose<T>(of.grad_query, of.tile.lanes, s.grad_query, dim, dim, of.tile.lanes, T(p.scale));
    for (int r = 0; r < of.tile.rows; ++r)
      scatter_row(s.grad_query + r * dim, block.accumulate, p.head_dim,
                  grad_query[row + of.lane + r], grad_query.col);
  }
}

template <class E>
void finish_grad_key_value(const Problem& p, const BackwardArgs& a, const BackwardBlock& block,
                           const BackwardScratch<E>& s) {
  using T = Compute<E>;
  const int64_t dim = padded<T>(p.head_dim), dim_v = padded<T>(p.head_dim_v);
  E* grad_key = plane<E>(p, a.grad_key, block.batch, block.kv_head);
  E* grad_value = plane<E>(p, a.grad_value, block.batch, block.kv_head);
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
  }
}

template <class E, class T = Compute<E>>
void finish_grad_mask_keys(const Problem& p, const BackwardArgs& a, const BackwardBlock& block,
                           const BackwardScratch<E>& s) {
  const T* sums = s.key_sums;
  for (int64_t key = block.key_begin; key < block.key_end; ++key)
    for (int64_t g = 0; g < p.group(); ++g, sums += kLanes<T>)
      plane<T>(p, a.grad_mask_keys, block.batch,
               block.kv_head * p.group() + g)[key * a.grad_mask_keys.strides.col] = *sums;
}

// All rows of the plane that may see one of the item's keys, block after block.
template <class E, class G>
void backward_plane(const Problem& p, const BackwardArgs& a, const BackwardBlock& block,
                    const Rows<G>& grad_query, BackwardScratch<E>& s) {
  const int64_t end = grad_row_end(p, block.key_end);
  const int64_t begin = std::min(grad_row_begin(p, block.key_begin), end);
  for (int64_t row = begin; row < end; row += kGradRows)
    backward_rows(p, a, block, row, std::min(kGradRows, end - row), grad_query, s);
  if (!grad_query.data || !block.clear_others) return;
  clear_rows(grad_query, 0, begin, p.head_dim);
  clear_rows(grad_query, end, p.group() * p.seqlen_q, p.head_dim);
}

template <class E>
void backward(const Problem& p, const BackwardArgs& a, const BackwardBlock& block,
              void* workspace) {
  using T = Compute<E>;
  Arena arena(workspace);
  const int64_t keys = block.key_end - block.key_begin;
  BackwardScratch<E> s(arena, p, keys);
  std::fill_n(s.grad_key, keys * padded<T>(p.head_dim), T(0));
  std::fill_n(s.grad_value, keys * padded<T>(p.head_dim_v), T(0));
  if (a.grad_mask_keys.data) std::fill_n(s.key_sums, keys * p.group() * kLanes<T>, T(0));
  if (block.grad_slopes) std::fill_n(block.grad_slopes, p.group(), 0.);
  if (block.grad_mask_rows) std::fill_n(block.grad_mask_rows, p.group() * p.seqlen_q, 0.);

  s.load_keys(p, block.batch, block.kv_head, block.key_begin, keys);
  if (block.partial_grad_query) {
    backward_plane(p, a, block,
                   Rows<T>{static_cast<T*>(block.partial_grad_query), 1, 0, p.head_dim, 1}, s);
  } else {
    backward_plane(p, a, block, rows_of<E>(p, a.grad_query, block.batch, block.kv_head), s);
  }
  if (a.grad_key.data || a.grad_value.data) finish_grad_key_value(p, a, block, s);
  if (a.grad_mask_keys.data) finish_grad_mask_keys(p, a, block, s);
}

// Adds the parts of row r that the splits after the first have left to `sum`.
template <class T>
void add_parts(const Problem& p, const GradQueryRows& rows, int64_t r, T* sum, int64_t col) {
  const T* partial = static_cast<const T*>(rows.partial_grad_query);
  const int64_t total = p.group() * p.seqlen_q;
  for (int64_t part = 0; part < rows.parts; ++part)
    if (r >= grad_row_begin(p, (part + 1) * rows.split_keys) &&
        r < grad_row_end(p, std::min(p.seqlen_k, (part + 2) * rows.split_keys)))
      scatter_row(partial + (part * total + r) * p.head_dim, true, p.head_dim, sum, col);
}

template <class E>
void finish_grad_query(const Problem& p, const BackwardArgs& a, const GradQueryRows& rows) {
  using T = Compute<E>;
  const Rows<E> grad_query = rows_of<E>(p, a.grad_query, rows.batch, rows.kv_head);
  for (int64_t r = rows.row_begin; r < rows.row_end; ++r) {
    if (rows.sums) {
      T* sum = static_cast<T*>(rows.sums) + r * p.head_dim;
      add_parts(p, rows, r, sum, 1);
      scatter_row(sum, false, p.head_dim, grad_query[r], grad_query.col);
    } else if constexpr (!kIsHalf<E>) {  // halves without sums have one split, and no parts
      add_parts(p, rows, r, grad_query[r], grad_query.col);
    }
  }
}

template <class E>
size_t backward_workspace(const Problem& p, int64_t keys) {
  Arena arena(nullptr);
  BackwardScratch<E>(arena, p, keys);
  return arena.used();
}

}  // namespace qkv::QKV_ISA
