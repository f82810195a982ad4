// The gradients of masks.
namespace qkv::QKV_ISA {

template <class T>
void add_grad_mask(const Problem& p, const Output& to, const Tile& tile, int64_t key, int64_t keys,
                   const T* grad_scores) {
  const auto add = [&](auto rows) { add_tile<T>(rows, tile, key, keys, grad_scores, T(1)); };
  p.mask_type == MaskType::f64 ? add(rows_of<double>(p, to, tile.batch, tile.kv_head))
                               : add(rows_of<float>(p, to, tile.batch, tile.kv_head));
}

// sums [rows of the tile] += each row over the keys.
template <class T>
void add_row_sums(const Tile& tile, int64_t keys, const T* grad_scores, double* sums) {
  for (int v = 0; v < tile.lanes; v += kLanes<T>) {
    Vec<T> sum{};
    for (int64_t j = 0; j < keys; ++j) sum += load(grad_scores + j * tile.step + v);
    for (int l = v; l < std::min(v + kLanes<T>, tile.rows); ++l) sums[l] += double(sum[l - v]);
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
