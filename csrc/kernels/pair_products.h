// The products of bf16 where pairs are multiplied. Weights are rounded to bf16 as an
// operand of their product, and nowhere else: their sum has them as they were.
namespace qkv::QKV_ISA {

template <>
class Products<BFloat16> {
 public:
  using Element = BFloat16;
  using Query = Pair;
  static constexpr int64_t kKeyMultiple = 2;  // values lie in pairs

  Products(Arena& arena, const Problem& p)
      : p_(p),
        unit_(!arena.counting()),
        queries_(arena, kRowBlock<float>, p.head_dim),
        key_copy_(arena.take<BFloat16>(kKeyBlock * padded_halves(p.head_dim))),
        values_(arena, kKeyBlock, p.head_dim_v),
        weights_(arena.take<Pair>(pairs_in(kKeyBlock) * kRowBlock<float>)) {}

  static int64_t block_keys(int64_t keys) { return key_step(keys); }
  static int64_t query_size(const Problem& p) {
    return kRowBlock<float> * padded_halves(p.head_dim) / 2;
  }
  void pack(const Tile& tile, Query* query) const {
    queries_.read(rows_of<BFloat16>(p_, p_.query, tile.batch, tile.kv_head), tile.row, tile.rows,
                  tile.lanes);
    queries_.transpose_to(0, tile.lanes, query);
  }

  void load_keys(int64_t batch, int64_t kv_head, int64_t key, int64_t keys) {
    first_ = key;
    keys_ = read_pairs(key_rows<BFloat16>(p_, batch, kv_head), p_.head_dim, key, keys, key_copy_);
  }
  void load_values(int64_t batch, int64_t kv_head, int64_t key, int64_t keys) {
    values_.read(value_rows<BFloat16>(p_, batch, kv_head), key, keys);
  }

  void scores(const Tile& tile, int64_t key, int64_t keys, const Query* query,
              float* scores) const {
    const Matrix<Pair> k = keys_.from(key - first_);
    gemm_pairs(keys, tile.lanes,
               {pairs_in(p_.head_dim), k.data, k.row, k.col, query, tile.lanes, scores, tile.step,
                Beta::zero, nullptr, float(p_.scale)});
  }

  void add_values(const Tile& tile, int64_t key, int64_t keys, const float* weights,
                  const float* rescale, float* output) const {
    pair_rows(weights, tile.step, keys, tile.lanes, weights_);
    const Matrix<Pair> v = values_.from(key - first_);
    gemm_pairs(p_.head_dim_v, tile.lanes,
               {pairs_in(keys), v.data, v.row, v.col, weights_, tile.lanes, output, tile.lanes,
                Beta::lanes, rescale});
  }

  const float* output_rows(const Tile& tile, const float* factors, float* output,
                           float* rows) const {
    return transposed_rows(tile, p_.head_dim_v, factors, output, rows);
  }

 private:
  const Problem& p_;
  PairUnit unit_;
  RowPairs queries_;  // scratch
  BFloat16* key_copy_;
  KeyPairs values_;
  Pair* weights_;  // scratch
  int64_t first_ = 0;
  Matrix<Pair> keys_{};
};

}  // namespace qkv::QKV_ISA
