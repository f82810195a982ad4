// Tiles that are added to something of the user's: weights and gradients of masks.
namespace qkv::QKV_ISA {

// [B..., H, L, S] += factor * a tile [keys x lanes]. Rows that share memory are added in
// their order.
template <class T, class M>
void add_tile(const Problem& p, const Output& to, const Tile& tile, int64_t key, int64_t keys,
              const T* from, T factor, const MaskScratch<T>& scratch) {
  constexpr int W = kLanes<T>;
  typedef M Sums __attribute__((vector_size(W * sizeof(M)), aligned(sizeof(M)), may_alias));
  const int64_t columns = padded<T>(keys);
  transpose<T>(from, tile.step, scratch.rows, columns, columns, tile.lanes, factor);
  const Rows<M> rows = rows_of<M>(p, to, tile.batch, tile.kv_head);
  for (int r = 0; r < tile.rows; ++r) {
    const T* row = scratch.rows + r * columns;
    M* sum = rows[tile.row + r] + key * rows.col;
    int64_t j = 0;
    if (rows.col == 1)
      for (; j + W <= keys; j += W)
        *reinterpret_cast<Sums*>(sum + j) += __builtin_convertvector(load(row + j), Sums);
    for (; j < keys; ++j) sum[j * rows.col] += M(row[j]);
  }
}

template <class T>
void add_grad_mask(const Problem& p, const Output& to, const Tile& tile, int64_t key, int64_t keys,
                   const T* grad_scores, const MaskScratch<T>& scratch) {
  if (p.mask_type == MaskType::f32) {
    add_tile<T, float>(p, to, tile, key, keys, grad_scores, T(1), scratch);
  } else {
    add_tile<T, double>(p, to, tile, key, keys, grad_scores, T(1), scratch);
  }
}

// sums [keys, G, lanes of a vector, all alike] += the rows of each head of a tile:
// products with a vector of ones. No head's NaN reaches another.
template <class T>
void add_key_sums(const Problem& p, const Tile& tile, int64_t keys, const T* grad_scores, T* sums) {
  constexpr int W = kLanes<T>;
  const int64_t group = p.group();
  T ones[W];
  store(ones, splat(T(1)));
  for (int64_t head = 0; head < group; ++head) {
    const int64_t lane = (head + group - tile.row % group) % group;
    const int64_t depth = (tile.rows - lane + group - 1) / group;
    if (depth > 0)
      gemm<T>(keys, W,
              {depth, grad_scores + lane, tile.step, group, ones, 0, sums + head * W, group * W,
               Beta::one, nullptr});
  }
}

}  // namespace qkv::QKV_ISA
