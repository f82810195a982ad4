// The products of the backward pass in bf16, where an instruction set multiplies pairs
// (gemm/pairs.h). They are those of grad_products.h, whose functions are described there. The
// weights and dS are rounded to bf16 as operands, and nowhere else.
namespace qkv::QKV_ISA {

template <>
class GradProducts<BFloat16> {
 public:
  static constexpr int64_t kKeyMultiple = 2;  // a tile begins with a pair of keys, for dQ

  GradProducts(Arena& arena, const Problem& p, int64_t key_count)
      : p_(p),
        unit_(!arena.counting()),
        dim_(padded<float>(p.head_dim)),
        query_(arena, kGradRows, p.head_dim),
        grad_output_(arena, kGradRows, p.head_dim_v),
        query_t_(arena.take<Pair>(kGradRows * padded_halves(p.head_dim) / 2)),
        grad_output_t_(arena.take<Pair>(kGradRows * padded_halves(p.head_dim_v) / 2)),
        grad_query_t_(arena.take<float>(kGradRows * dim_)),
        grad_query_(arena.take<float>(kRowBlock<float> * dim_)),
        few_(has_few_rows<BFloat16>(p)),
        few_query_(few_ ? arena.take<float>(kFewRows * dim_) : nullptr),
        key_copy_(arena.take<BFloat16>(key_count * padded_halves(p.head_dim))),
        value_copy_(arena.take<BFloat16>(key_count * padded_halves(p.head_dim_v))),
        key_pairs_(arena, key_count, p.head_dim),
        narrow_(arena.take<BFloat16>(kKeyBlock * kGradRows)),
        zipped_(arena.take<Pair>(padded<Pair>(pairs_in(kKeyBlock)) * kRowBlock<float>)),
        parted_pairs_(arena, hides_any(p) ? kKeyBlock : 0, p.head_dim),
        parted_keys_(arena, p, p.head_dim),
        parted_query_(arena, p, p.head_dim),
        parted_grad_output_(arena, p, p.head_dim_v) {}

  void load_keys(int64_t batch, int64_t kv_head, int64_t key, int64_t keys) {
    first_ = key;
    key_rows_ = key_rows<BFloat16>(p_, batch, kv_head);
    keys_ = read_pairs(key_rows_, p_.head_dim, key, keys, key_copy_);
    key_pairs_.read(key_rows_, key, keys);
    loaded_keys_.load({key_rows_.at(key), key_rows_.row(), key_rows_.col()}, key, keys,
                      p_.head_dim);
    values_ =
        read_pairs(value_rows<BFloat16>(p_, batch, kv_head), p_.head_dim_v, key, keys, value_copy_);
  }

  void load_rows(const BackwardArgs& a, int64_t batch, int64_t kv_head, int64_t row, int64_t rows) {
    has_grad_output_ = a.grad_output.data != nullptr;
    const int64_t first = row / p_.group(), last = (row + rows - 1) / p_.group();
    sees_few_ = 8 * (key_end(p_, last) - key_begin(p_, first)) <= p_.seqlen_k;
    const int64_t count = padded<float>(rows);
    const auto read = [&](const Input& input, RowPairs& to) {
      to.read(rows_of<BFloat16>(p_, input, batch, kv_head), row, rows, count);
      to.zip(count);
    };
    read(p_.query, query_);
    if (has_grad_output_) read(a.grad_output, grad_output_);
    if (few_) pack_few_queries<BFloat16>(p_, batch, kv_head, row, rows, few_query_);
    std::fill_n(grad_query_t_, count * dim_, 0.f);
  }

  void pack(const Tile& tile, int64_t lane) {
    query_.transpose_to(lane, tile.lanes, tile_query(lane));
    if (has_grad_output_) grad_output_.transpose_to(lane, tile.lanes, tile_grad_output(lane));
  }

  // Where the number of keys is odd, the last one is paired with a key that the tile does not see,
  // and that is multiplied by 0: it counts as hidden.
  bool hides_nonfinite(const Tile& tile, int64_t key, int64_t keys, const float* weights) {
    if (loaded_keys_.are_finite(key, key + 2 * pairs_in(keys))) return false;
    parted_keys_.part(key_rows_, key, keys);
    return parted_keys_.hide(p_, tile, key, keys, weights) || keys % 2 != 0;
  }
  bool part_rows(int64_t rows) {
    const int64_t count = padded<float>(rows);
    const bool query_is_finite = parted_query_.part(query_, count);
    return (!has_grad_output_ || parted_grad_output_.part(grad_output_, count)) && query_is_finite;
  }

  void scores(const Tile& tile, int64_t lane, int64_t key, int64_t keys, float* scores) const {
    const Matrix<Pair> k = keys_.from(key - first_);
    if (few_)
      return few_scores(tile, dim_, keys, reinterpret_cast<const BFloat16*>(k.data), 2 * k.row,
                        few_query_, scores, {});
    gemm_pairs(keys, tile.lanes,
               {depth_pairs(p_.head_dim), k.data, k.row, k.col, tile_query(lane), tile.lanes,
                scores, tile.step, Beta::zero, nullptr, float(p_.scale)});
  }

  void grad_weights(const Tile& tile, int64_t lane, int64_t key, int64_t keys,
                    float* grad_weights) const {
    const Matrix<Pair> v = values_.from(key - first_);
    gemm_pairs(keys, tile.lanes,
               {has_grad_output_ ? depth_pairs(p_.head_dim_v) : 0, v.data, v.row, v.col,
                tile_grad_output(lane), tile.lanes, grad_weights, tile.step, Beta::zero, nullptr,
                dropout_factor()});
  }

  void add_grad_query(const Tile& tile, int64_t lane, int64_t key, int64_t keys,
                      const float* grad_scores) const {
    add_keys(tile, lane, key_pairs_, key - first_, keys, grad_scores);
  }
  void add_visible_grad_query(const Tile& tile, int64_t lane, int64_t key, int64_t keys,
                              const float* grad_scores) {
    parted_pairs_.read(parted_keys_.finite(), key, keys);
    add_keys(tile, lane, parted_pairs_, 0, keys, grad_scores);
    parted_keys_.add(tile, grad_query_t_ + lane * dim_);
  }

  bool grad_query_is_nan(const Tile& tile, int64_t lane) const {
    return all_nan(grad_query_t_ + lane * dim_, p_.head_dim * tile.lanes);
  }
  const float* grad_query(const Tile& tile, int64_t lane) const {
    transpose(grad_query_t_ + lane * dim_, tile.lanes, grad_query_, dim_, dim_, tile.lanes,
              float(p_.scale));
    return grad_query_;
  }

  void add_grad_value(int64_t lane, int64_t rows, int64_t keys, const float* weights,
                      float* grad_value) const {
    if (has_grad_output_)
      add_rows(grad_output_, p_.head_dim_v, lane, rows, keys, weights, grad_value,
               dropout_factor());
  }
  void add_grad_key(int64_t lane, int64_t rows, int64_t keys, const float* grad_scores,
                    float* grad_key) const {
    add_rows(query_, p_.head_dim, lane, rows, keys, grad_scores, grad_key, 1);
  }

  void add_nonfinite_grad_value(int64_t lane, int64_t rows, int64_t keys, const float* marks,
                                float* grad_value) const {
    if (has_grad_output_) parted_grad_output_.add(lane, rows, keys, marks, grad_value);
  }
  void add_nonfinite_grad_key(int64_t lane, int64_t rows, int64_t keys, const float* marks,
                              float* grad_key) const {
    parted_query_.add(lane, rows, keys, marks, grad_key);
  }

 private:
  // grad_query += K^T dS^T of `keys` keys from `first` on.
  void add_keys(const Tile& tile, int64_t lane, const KeyPairs& pairs, int64_t first, int64_t keys,
                const float* grad_scores) const {
    const Matrix<Pair> k = pairs.from(first);
    const int64_t depth = pairs.depth(first, keys);
    pad_pairs(zipped_, tile.lanes, keys, depth);
    const auto add_zipped = [&] {
      gemm_pairs(product_rows(p_.head_dim), tile.lanes,
                 {depth, k.data, k.row, k.col, zipped_, tile.lanes, grad_query_t_ + lane * dim_,
                  tile.lanes, Beta::one, nullptr});
    };
    pair_rows(grad_scores, tile.step, keys, tile.lanes, zipped_);
    add_zipped();
    if (!sees_few_) return;
    pair_rest(grad_scores, tile.step, keys, tile.lanes, zipped_);
    add_zipped();
  }

  // to [keys, padded(dim)] += factor * tile [keys x kGradRows] * rows of `from`.
  void add_rows(const RowPairs& from, int64_t dim, int64_t lane, int64_t rows, int64_t keys,
                const float* tile, float* to, float factor) const {
    narrow_rows(tile, kGradRows, keys, rows, narrow_, kGradRows);
    add_narrow(from, dim, lane, rows, keys, to, factor);
    if (!sees_few_) return;
    narrow_rest(tile, kGradRows, keys, rows, narrow_, kGradRows);
    add_narrow(from, dim, lane, rows, keys, to, factor);
  }
  void add_narrow(const RowPairs& from, int64_t dim, int64_t lane, int64_t rows, int64_t keys,
                  float* to, float factor) const {
    gemm_pairs(keys, padded<float>(dim),
               {pairs_in(rows), reinterpret_cast<const Pair*>(narrow_), kGradRows / 2, 1,
                from.zipped(lane), padded_halves(dim), to, padded<float>(dim), Beta::one, nullptr,
                factor});
  }

  Pair* tile_query(int64_t lane) const { return query_t_ + lane * padded_halves(p_.head_dim) / 2; }
  Pair* tile_grad_output(int64_t lane) const {
    return grad_output_t_ + lane * padded_halves(p_.head_dim_v) / 2;
  }
  // Applied to the product, in f32, and not to an operand, which would be rounded to bf16 again.
  float dropout_factor() const { return float(dropout_scale(p_.dropout_p)); }

  const Problem& p_;
  PairUnit unit_;
  int64_t dim_;
  RowPairs query_, grad_output_;
  Pair *query_t_, *grad_output_t_;
  float *grad_query_t_, *grad_query_;
  bool few_;          // scores as FewRowProducts computes them ...
  float* few_query_;  // ... of query times scale
  BFloat16 *key_copy_, *value_copy_;
  KeyPairs key_pairs_;
  BFloat16* narrow_;  // scratch
  Pair* zipped_;      // scratch
  bool has_grad_output_ = false;
  // Whether the rows see at most an eighth of the keys. Such rows have the largest weights, which
  // decide how accurate gradients are, and they cost little. So what rounding took off an operand
  // is multiplied, too.
  bool sees_few_ = false;
  int64_t first_ = 0;
  Matrix<Pair> keys_{}, values_{};
  KeyRows<BFloat16> key_rows_;
  LoadedKeys<BFloat16> loaded_keys_;
  KeyPairs parted_pairs_;
  NonfiniteKeys<BFloat16, Infinities::as_nan> parted_keys_;
  NonfiniteRows<BFloat16, Infinities::as_nan> parted_query_;
  NonfiniteRows<BFloat16, Infinities::kept> parted_grad_output_;
};

}  // namespace qkv::QKV_ISA
