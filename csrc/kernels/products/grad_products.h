// The products of the backward pass, in the compute type:
//
//   S^T = K Q^T    dP^T = V dO^T    dQ^T += K^T dS^T    dV += P^T dO    dK += dS^T Q
//
// for a block of kGradRows rows against the keys of an item.
namespace qkv::QKV_ISA {

template <class E>
class GradProducts {
  using T = Compute<E>;

 public:
  static constexpr int64_t kKeyMultiple = 1;  // a tile may begin at multiples of it in an item

  GradProducts(Arena& arena, const Problem& p, int64_t key_count)
      : p_(p),
        dim_(padded<T>(p.head_dim)),
        dim_v_(padded<T>(p.head_dim_v)),
        query_(arena.take<T>(kGradRows * dim_)),
        grad_output_(arena.take<T>(kGradRows * dim_v_)),
        query_t_(arena.take<T>(kGradRows * dim_)),
        grad_output_t_(arena.take<T>(kGradRows * dim_v_)),
        grad_query_t_(arena.take<T>(kGradRows * dim_)),
        few_(has_few_rows<E>(p)),
        few_query_(few_ ? arena.take<T>(kFewRows * dim_) : nullptr),
        key_copy_(copies_keys<E>(p) ? arena.take<T>(key_count * dim_) : nullptr),
        value_copy_(copies_keys<E>(p) ? arena.take<T>(key_count * dim_v_) : nullptr),
        parted_copy_(copies_keys<E>(p) && hides_any(p) ? arena.take<T>(kKeyBlock * dim_) : nullptr),
        parted_keys_(arena, p, p.head_dim),
        parted_query_(arena, p, p.head_dim),
        parted_grad_output_(arena, p, p.head_dim_v) {}

  void load_keys(int64_t batch, int64_t kv_head, int64_t key, int64_t keys) {
    first_ = key;
    key_rows_ = key_rows<E>(p_, batch, kv_head);
    keys_ = key_rows_.read(key, keys, key_copy_);
    loaded_keys_.load(keys_, key, keys, p_.head_dim);
    values_ = value_rows<E>(p_, batch, kv_head).read(key, keys, value_copy_);
  }

  // Reads rows [row, row + rows) of query and grad_output, adds rows of zeros, and sets grad_query
  // to 0.
  void load_rows(const BackwardArgs& a, int64_t batch, int64_t kv_head, int64_t row, int64_t rows) {
    has_grad_output_ = a.grad_output.data != nullptr;
    gather_rows(rows_of<E>(p_, p_.query, batch, kv_head), row, rows, padded<T>(rows), p_.head_dim,
                query_);
    if (few_) pack_few_queries<E>(p_, batch, kv_head, row, rows, few_query_);
    if (has_grad_output_) {
      gather_rows(rows_of<E>(p_, a.grad_output, batch, kv_head), row, rows, padded<T>(rows),
                  p_.head_dim_v, grad_output_);
      if (p_.dropout_p > 0)
        for (int64_t i = 0; i < rows * dim_v_; ++i)
          grad_output_[i] *= T(dropout_scale(p_.dropout_p));
    }
    std::fill_n(grad_query_t_, padded<T>(rows) * dim_, T(0));
  }

  // Transposes the rows of one tile, the first of which is row `lane` of those that were read.
  void pack(const Tile& tile, int64_t lane) {
    transpose<T>(query_ + lane * dim_, dim_, query_t_ + lane * dim_, tile.lanes, tile.lanes, dim_,
                 T(p_.scale));
    if (has_grad_output_)
      transpose<T>(grad_output_ + lane * dim_v_, dim_v_, grad_output_t_ + lane * dim_v_, tile.lanes,
                   tile.lanes, dim_v_, T(1));
  }

  // Whether one of keys [key, key + keys), which are loaded, is not finite and hidden from a row.
  bool hides_nonfinite(const Tile& tile, int64_t key, int64_t keys, const T* weights) {
    return !loaded_keys_.are_finite(key, key + keys) && !parted_keys_.part(key_rows_, key, keys) &&
           parted_keys_.hide(p_, tile, key, keys, weights);
  }
  // Returns whether all rows are finite. If not, it takes what is not finite out of the rows that
  // dK and dV are products of, and leaves it to add_nonfinite_grad_key and
  // add_nonfinite_grad_value. Must be called after all tiles are packed.
  bool part_rows(int64_t rows) {
    const bool query_is_finite = parted_query_.part(query_, rows);
    return (!has_grad_output_ || parted_grad_output_.part(grad_output_, rows)) && query_is_finite;
  }

  // scores [keys x lanes] = the scores of keys [key, key + keys), which are loaded, before any
  // option.
  void scores(const Tile& tile, int64_t lane, int64_t key, int64_t keys, T* scores) const {
    const Matrix<T> k = keys_.from(key - first_);
    if (few_) return few_scores<T>(tile, dim_, keys, k.data, k.row, few_query_, scores, {});
    gemm<T>(keys, tile.lanes,
            {p_.head_dim, k.data, k.row, k.col, query_t_ + lane * dim_, tile.lanes, scores,
             tile.step, Beta::zero, nullptr});
  }

  // grad_weights [keys x lanes] = dP^T, times the factor of dropout.
  void grad_weights(const Tile& tile, int64_t lane, int64_t key, int64_t keys,
                    T* grad_weights) const {
    const Matrix<T> v = values_.from(key - first_);
    gemm<T>(
        keys, tile.lanes,
        {has_grad_output_ ? p_.head_dim_v : 0, v.data, v.row, v.col, grad_output_t_ + lane * dim_v_,
         tile.lanes, grad_weights, tile.step, Beta::zero, nullptr});
  }

  void add_grad_query(const Tile& tile, int64_t lane, int64_t key, int64_t keys,
                      const T* grad_scores) const {
    add_keys(tile, lane, keys_.from(key - first_), keys, grad_scores);
  }
  // add_grad_query without the hidden pairs. hides_nonfinite must have been called for the same
  // keys before.
  void add_visible_grad_query(const Tile& tile, int64_t lane, int64_t key, int64_t keys,
                              const T* grad_scores) const {
    add_keys(tile, lane, parted_keys_.finite().read(key, keys, parted_copy_), keys, grad_scores);
    parted_keys_.add(tile, grad_query_t_ + lane * dim_);
  }

  bool grad_query_is_nan(const Tile& tile, int64_t lane) const {
    return all_nan(grad_query_t_ + lane * dim_, p_.head_dim * tile.lanes);
  }

  // Returns the rows [tile.rows, padded(D)] of grad_query. Overwrites the tile's queries.
  const T* grad_query(const Tile& tile, int64_t lane) const {
    transpose<T>(grad_query_t_ + lane * dim_, tile.lanes, query_ + lane * dim_, dim_, dim_,
                 tile.lanes, T(p_.scale));
    return query_ + lane * dim_;
  }

  // Add what rows [lane, lane + rows) contribute to dV and dK of the keys. weights and grad_scores
  // [keys x kGradRows] point to column `lane`.
  void add_grad_value(int64_t lane, int64_t rows, int64_t keys, const T* weights,
                      T* grad_value) const {
    if (has_grad_output_)
      gemm<T>(keys, dim_v_,
              {rows, weights, kGradRows, 1, grad_output_ + lane * dim_v_, dim_v_, grad_value,
               dim_v_, Beta::one, nullptr});
  }
  void add_grad_key(int64_t lane, int64_t rows, int64_t keys, const T* grad_scores,
                    T* grad_key) const {
    gemm<T>(keys, dim_,
            {rows, grad_scores, kGradRows, 1, query_ + lane * dim_, dim_, grad_key, dim_, Beta::one,
             nullptr});
  }

  // Add what part_rows has taken out. marks [keys x kGradRows] point to column `lane`.
  void add_nonfinite_grad_value(int64_t lane, int64_t rows, int64_t keys, const T* marks,
                                T* grad_value) const {
    if (has_grad_output_) parted_grad_output_.add(lane, rows, keys, marks, grad_value);
  }
  void add_nonfinite_grad_key(int64_t lane, int64_t rows, int64_t keys, const T* marks,
                              T* grad_key) const {
    parted_query_.add(lane, rows, keys, marks, grad_key);
  }

 private:
  // grad_query += K^T dS^T of these keys.
  void add_keys(const Tile& tile, int64_t lane, const Matrix<T>& k, int64_t keys,
                const T* grad_scores) const {
    gemm<T>(p_.head_dim, tile.lanes,
            {keys, k.data, k.col, k.row, grad_scores, tile.step, grad_query_t_ + lane * dim_,
             tile.lanes, Beta::one, nullptr});
  }

  const Problem& p_;
  int64_t dim_, dim_v_;
  // The block of rows: natural [kGradRows, padded(D)], grad_output times the
  // factor of dropout ...
  T *query_, *grad_output_;
  // ... and tile by tile [padded(D), lanes].
  T *query_t_, *grad_output_t_, *grad_query_t_;
  bool few_;      // scores as FewRowProducts computes them ...
  T* few_query_;  // ... of query times scale
  T *key_copy_, *value_copy_;
  bool has_grad_output_ = false;
  int64_t first_ = 0;  // the first key that is loaded
  Matrix<T> keys_{}, values_{};
  KeyRows<E> key_rows_;
  LoadedKeys<T> loaded_keys_;
  T* parted_copy_;
  NonfiniteKeys<E, Infinities::as_nan> parted_keys_;
  NonfiniteRows<E, Infinities::as_nan> parted_query_;
  NonfiniteRows<E, Infinities::kept> parted_grad_output_;
};

}  // namespace qkv::QKV_ISA
