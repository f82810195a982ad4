// The products of the forward pass: S^T = K Q^T and O^T += V^T P^T, in the compute type.
namespace qkv::QKV_ISA {

// to [tile.rows, padded(dim)] = the columns of output [dim x lanes] times factors
// [lanes]. Overwrites output.
template <class T>
const T* transposed_rows(const Tile& tile, int64_t dim, const T* factors, T* output, T* to) {
  for (int v = 0; v < tile.lanes; v += kLanes<T>)
    for (int64_t d = 0; d < dim; ++d) {
      T* at = output + d * tile.lanes + v;
      store(at, load(at) * load(factors + v));
    }
  const int64_t step = padded<T>(dim);
  transpose(output, tile.lanes, to, step, step, tile.lanes);
  return to;
}

// Whether a row of output [dim x lanes] holds NaN or an infinity. One in a value spoils all lanes
// of its row alike, so it is enough to look at one vector of lanes.
template <class T>
bool is_spoilt(const Tile& tile, int64_t dim, const T* output) {
  constexpr int kSums = 4;  // independent sums, which hide the latency of an addition
  Vec<T> zero[kSums] = {};
  int64_t d = 0;
  for (; d + kSums <= dim; d += kSums) {
    QKV_UNROLL
    for (int s = 0; s < kSums; ++s) zero[s] += load(output + (d + s) * tile.lanes) * T(0);
  }
  for (; d < dim; ++d) zero[0] += load(output + d * tile.lanes) * T(0);
  return any_nonzero<T>(zero[0] + zero[1] + (zero[2] + zero[3]));
}

// The products of tiles of queries with one block of keys and values. load_keys and load_values
// read a block, which serves every tile before the next block is read.
template <class E>
class Products {
  using T = Compute<E>;

 public:
  using Element = E;
  using Query = T;                            // the elements of a packed tile of queries
  static constexpr int64_t kKeyMultiple = 1;  // a tile may begin at multiples of it in a block

  Products(Arena& arena, const Problem& p)
      : p_(p),
        rows_(arena.take<T>(kRowBlock<T> * padded<T>(p.head_dim))),
        key_copy_(copies_keys<E>(p) ? arena.take<T>(kKeyBlock * padded<T>(p.head_dim)) : nullptr),
        value_copy_(copies_keys<E>(p) ? arena.take<T>(kKeyBlock * padded<T>(p.head_dim_v))
                                      : nullptr),
        finite_copy_(copies_keys<E>(p) && hides_any(p)
                         ? arena.take<T>(kKeyBlock * padded<T>(p.head_dim_v))
                         : nullptr),
        parted_values_(arena, p, p.head_dim_v) {}

  // How many keys each block has that `keys` keys are cut into.
  static int64_t block_keys(int64_t keys) { return key_step(keys); }
  // How many elements a packed tile of queries has, and its output.
  static int64_t query_size(const Problem& p) { return kRowBlock<T> * padded<T>(p.head_dim); }
  static int64_t output_size(const Problem& p) { return kRowBlock<T> * padded<T>(p.head_dim_v); }
  void pack(const Tile& tile, Query* query) const { pack_queries<E>(p_, tile, rows_, query); }

  void load_keys(int64_t batch, int64_t kv_head, int64_t key, int64_t keys) {
    first_ = key;
    keys_ = key_rows<E>(p_, batch, kv_head).read(key, keys, key_copy_);
  }
  void load_values(int64_t batch, int64_t kv_head, int64_t key, int64_t keys) {
    value_count_ = keys;
    value_rows_ = value_rows<E>(p_, batch, kv_head);
    values_ = value_rows_.read(key, keys, value_copy_);
  }

  // Returns whether all of the loaded values are finite. If not, it sets those that are not apart
  // from the others (repair/nonfinite_keys.h), for add_visible_values.
  bool part_values() {
    if (parted_values_.part(value_rows_, first_, value_count_)) return true;
    finite_values_ = parted_values_.finite().read(first_, value_count_, finite_copy_);
    return false;
  }
  bool values_are_parted() const { return parted_values_.hold(first_, value_count_); }

  // scores [keys x lanes] = the scores of keys [key, key + keys), which are loaded, before any
  // option.
  void scores(const Tile& tile, int64_t key, int64_t keys, const Query* query, T* scores) const {
    const Matrix<T> k = keys_.from(key - first_);
    gemm<T>(keys, tile.lanes,
            {p_.head_dim, k.data, k.row, k.col, query, tile.lanes, scores, tile.step, Beta::zero,
             nullptr});
  }

  // output [Dv x lanes] = rescale [lanes] * before + V^T weights [keys x lanes]. `before` and
  // `output` lie in one workspace, and may be the same.
  void add_values(const Tile& tile, int64_t key, int64_t keys, const T* weights, const T* rescale,
                  const T* before, T* output) const {
    multiply(tile, values_.from(key - first_), keys, weights, rescale, before, output);
  }

  // Whether one of these values, which part_values has set apart, is not finite and hidden from a
  // row.
  bool hides_nonfinite(const Tile& tile, int64_t key, int64_t keys, const T* weights) {
    return parted_values_.hide(p_, tile, key, keys, weights);
  }
  // add_values without the hidden pairs. hides_nonfinite must have been called for the same keys
  // before.
  void add_visible_values(const Tile& tile, int64_t key, int64_t keys, const T* weights,
                          const T* rescale, const T* before, T* output) const {
    multiply(tile, finite_values_.from(key - first_), keys, weights, rescale, before, output);
    parted_values_.add(tile, output);
  }

  // Whether values that are not finite may have got into output.
  bool is_spoilt(const Tile& tile, const T* output) const {
    return QKV_ISA::is_spoilt(tile, p_.head_dim_v, output);
  }

  // Returns the rows [tile.rows, padded(Dv)] of factors [lanes] * output; `output` is overwritten.
  const T* output_rows(const Tile& tile, const T* factors, T* output, T* rows) const {
    return transposed_rows(tile, p_.head_dim_v, factors, output, rows);
  }

 private:
  void multiply(const Tile& tile, const Matrix<T>& v, int64_t keys, const T* weights,
                const T* rescale, const T* before, T* output) const {
    gemm<T>(p_.head_dim_v, tile.lanes,
            {keys, v.data, v.col, v.row, weights, tile.step, output, tile.lanes, Beta::lanes,
             rescale, 1, before - output});
  }

  const Problem& p_;
  T *rows_, *key_copy_, *value_copy_, *finite_copy_;
  int64_t first_ = 0, value_count_ = 0;  // the first key that is loaded, and how many values
  Matrix<T> keys_{}, values_{}, finite_values_{};
  KeyRows<E> value_rows_;
  NonfiniteKeys<E, Infinities::kept> parted_values_;
};

}  // namespace qkv::QKV_ISA
