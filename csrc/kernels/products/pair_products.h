// The products of the forward pass in bf16, where an instruction set multiplies pairs
// (gemm/pairs.h).
//
// The weights are an operand, so they are rounded to bf16. To keep their error small they are first
// divided by the largest weight of their row so far, which so becomes 1, and at the end the output
// is divided by the sum of the rounded weights. The log-sum-exp has the sum of the exact ones.
namespace qkv::QKV_ISA {

template <>
class Products<BFloat16> {
 public:
  using Element = BFloat16;
  using Query = Pair;
  static constexpr int64_t kKeyMultiple = 2;  // a tile begins with a pair of values

  Products(Arena& arena, const Problem& p)
      : p_(p),
        unit_(!arena.counting()),
        queries_(arena, kRowBlock<float>, p.head_dim),
        key_copy_(arena.take<BFloat16>(kKeyBlock * padded_halves(p.head_dim))),
        values_(arena, kKeyBlock, p.head_dim_v),
        weights_(arena.take<Pair>(padded<Pair>(pairs_in(kKeyBlock)) * kRowBlock<float>)),
        parted_values_(arena, p, p.head_dim_v),
        finite_values_(arena, hides_any(p) ? kKeyBlock : 0, p.head_dim_v) {}

  static int64_t block_keys(int64_t keys) { return key_step(keys); }
  static int64_t query_size(const Problem& p) {
    return kRowBlock<float> * padded_halves(p.head_dim) / 2;
  }
  // Below the output [padded(Dv) x lanes] lie two rows more: the largest weight, by which the
  // output is divided, and what rounding has added to the sum of the weights, divided by it as
  // well.
  static int64_t output_size(const Problem& p) {
    return kRowBlock<float> * (padded<float>(p.head_dim_v) + 2);
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
    value_count_ = keys;
    value_rows_ = value_rows<BFloat16>(p_, batch, kv_head);
    values_.read(value_rows_, key, keys);
  }

  bool part_values() {
    if (parted_values_.part(value_rows_, first_, value_count_)) return true;
    finite_values_.read(parted_values_.finite(), first_, value_count_);
    return false;
  }
  bool values_are_parted() const { return parted_values_.hold(first_, value_count_); }

  void scores(const Tile& tile, int64_t key, int64_t keys, const Query* query,
              float* scores) const {
    const Matrix<Pair> k = keys_.from(key - first_);
    gemm_pairs(keys, tile.lanes,
               {depth_pairs(p_.head_dim), k.data, k.row, k.col, query, tile.lanes, scores,
                tile.step, Beta::zero, nullptr, float(p_.scale)});
  }

  void add_values(const Tile& tile, int64_t key, int64_t keys, const float* weights,
                  const float* rescale, const float* before, float* output) const {
    multiply(tile, values_, key - first_, keys, weights, rescale, before, output);
  }

  bool hides_nonfinite(const Tile& tile, int64_t key, int64_t keys, const float* weights) {
    return parted_values_.hide(p_, tile, key, keys, weights);
  }
  void add_visible_values(const Tile& tile, int64_t key, int64_t keys, const float* weights,
                          const float* rescale, const float* before, float* output) const {
    multiply(tile, finite_values_, key - first_, keys, weights, rescale, before, output);
    parted_values_.add(tile, output);
  }
  bool is_spoilt(const Tile& tile, const float* output) const {
    return QKV_ISA::is_spoilt(tile, p_.head_dim_v, output);
  }

  const float* output_rows(const Tile& tile, float* factors, float* output, float* rows) const {
    for (int v = 0; v < tile.lanes; v += kLanes<float>) {
      const float* largest = largest_weights(tile, output) + v;
      const Vec<float> factor = load(factors + v) * load(largest);
      // With dropout the sum is that of all weights, and those that were multiplied are only the
      // kept ones, so what rounding added to these says nothing about the sum.
      const Vec<float> error = p_.dropout_p > 0 ? Vec<float>{} : load(largest + tile.lanes);
      store(factors + v, factor / (1 + error * factor));
    }
    return transposed_rows(tile, p_.head_dim_v, factors, output, rows);
  }

 private:
  void multiply(const Tile& tile, const KeyPairs& pairs, int64_t first, int64_t keys,
                const float* weights, const float* rescale, const float* before,
                float* output) const {
    float inverse[kRowBlock<float>], keep[kRowBlock<float>], errors[kRowBlock<float>];
    const float* largest = largest_weights(tile, before);
    float* now_largest = largest_weights(tile, output);
    for (int v = 0; v < tile.lanes; v += kLanes<float>) {
      const Vec<float> rescaled = load(largest + v) * load(rescale + v);
      Vec<float> top = max<float>(rescaled, splat(1e-30f));  // not 0, which would give 0 / 0
      for (int64_t j = 0; j < keys; ++j) top = max<float>(top, load(weights + j * tile.step + v));
      store(now_largest + v, top);
      store(inverse + v, 1 / top);
      store(keep + v, rescaled / top);
    }
    pair_rows(weights, tile.step, keys, tile.lanes, inverse, weights_, errors);
    for (int v = 0; v < tile.lanes; v += kLanes<float>)
      store(now_largest + tile.lanes + v,
            load(largest + tile.lanes + v) * load(keep + v) + load(errors + v));
    const Matrix<Pair> v = pairs.from(first);
    const int64_t depth = pairs.depth(first, keys);
    pad_pairs(weights_, tile.lanes, keys, depth);
    gemm_pairs(product_rows(p_.head_dim_v), tile.lanes,
               {depth, v.data, v.row, v.col, weights_, tile.lanes, output, tile.lanes, Beta::lanes,
                keep, 1, before - output});
  }

  template <class F>  // float or const float
  F* largest_weights(const Tile& tile, F* output) const {
    return output + tile.lanes * padded<float>(p_.head_dim_v);
  }

  const Problem& p_;
  PairUnit unit_;
  RowPairs queries_;  // scratch
  BFloat16* key_copy_;
  KeyPairs values_;
  Pair* weights_;  // scratch
  int64_t first_ = 0, value_count_ = 0;
  Matrix<Pair> keys_{};
  KeyRows<BFloat16> value_rows_;
  NonfiniteKeys<BFloat16, Infinities::kept> parted_values_;
  KeyPairs finite_values_;
};

}  // namespace qkv::QKV_ISA
