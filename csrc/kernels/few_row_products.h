// The products of the forward pass for planes of few rows (few_rows.h).
//
// What limits them is memory, so it is kept busy: while one block of keys is
// multiplied, its values are asked for, and while those are, the next keys.
namespace qkv::QKV_ISA {

// Keys of a block: its values, asked for, wait in the first-level cache. (16 and
// 64 were slower; so was a hint for the second level.)
constexpr int64_t kFewKeys = 32;

// What Products is for other planes. output is [rows, Dv].
template <class E>
class FewRowProducts {
  using T = Compute<E>;

 public:
  using Element = E;
  using Query = T;
  static constexpr int64_t kKeyMultiple = 1;

  FewRowProducts(Arena&, const Problem& p) : p_(p) {}

  static int64_t block_keys(int64_t) { return kFewKeys; }
  static int64_t query_size(const Problem& p) { return kRowBlock<T> * p.head_dim; }
  static int64_t output_size(const Problem& p) { return kRowBlock<T> * p.head_dim_v; }

  void pack(const Tile& tile, Query* query) const {
    pack_few_queries<E>(p_, tile.batch, tile.kv_head, tile.row, tile.rows, query);
  }

  // Nothing is copied: products read the user's memory.
  void load_keys(int64_t batch, int64_t kv_head, int64_t, int64_t) {
    keys_ = key_rows<E>(p_, batch, kv_head);
  }
  void load_values(int64_t batch, int64_t kv_head, int64_t, int64_t) {
    values_ = value_rows<E>(p_, batch, kv_head);
  }

  void scores(const Tile& tile, int64_t key, int64_t keys, const Query* query, T* scores) const {
    keys_.for_each_run(key, keys, [&](int64_t j, int64_t count) {
      few_scores<E>(tile, p_.head_dim, count, keys_.at(j), keys_.row(), query,
                    scores + (j - key) * tile.step,
                    Ahead(values_.at(j), values_.row(), p_.head_dim_v));
    });
  }

  void add_values(const Tile& tile, int64_t key, int64_t keys, const T* weights, const T* rescale,
                  T* output) const {
    const int64_t dim = p_.head_dim_v;
    for (int r = 0; r < tile.rows; ++r)
      for (int64_t d = 0; d < dim; d += kLanes<T>)
        store(output + r * dim + d, load(output + r * dim + d) * rescale[r]);
    values_.for_each_run(key, keys, [&](int64_t j, int64_t count) {
      add_few_values<E>(
          tile.rows, dim, count, values_.at(j), values_.row(), weights + (j - key) * tile.step,
          tile.step, output,
          j + keys < p_.seqlen_k ? Ahead(keys_.at(j + keys), keys_.row(), p_.head_dim) : Ahead());
    });
  }

  const T* output_rows(const Tile& tile, const T* factors, T* output, T*) const {
    for (int r = 0; r < tile.rows; ++r)
      for (int64_t d = 0; d < p_.head_dim_v; d += kLanes<T>) {
        T* at = output + r * p_.head_dim_v + d;
        store(at, load(at) * factors[r]);
      }
    return output;
  }

 private:
  const Problem& p_;
  KeyRows<E> keys_, values_;
};

}  // namespace qkv::QKV_ISA
