// Keys, values and rows in bf16, as the operands of products of pairs.
namespace qkv::QKV_ISA {

// How many pairs of a row of `dim` bf16 a product along the row multiplies. AMX tiles take 16 pairs
// at a time, and would have to copy both operands where fewer are left over; so they are given rows
// that are padded with zeros.
constexpr int64_t depth_pairs(int64_t dim) {
  return kTiles ? padded_halves(dim) / 2 : pairs_in(dim);
}

// Rows [key, key + keys) as depth_pairs(dim) pairs of neighbouring columns. They are read where
// they lie if their layout permits, else copied to scratch [keys, padded_halves(dim)].
inline Matrix<Pair> read_pairs(const KeyRows<BFloat16>& rows, int64_t dim, int64_t key,
                               int64_t keys, BFloat16* scratch) {
  const auto as_pairs = [](const BFloat16* data, int64_t row) -> Matrix<Pair> {
    return {reinterpret_cast<const Pair*>(data), row / 2, 1};
  };
  const bool ends_with_a_pair = dim == 2 * depth_pairs(dim);
  if (rows.col() == 1 && rows.row() % 2 == 0 && ends_with_a_pair && rows.run_end(key) >= key + keys)
    return as_pairs(rows.at(key), rows.row());
  const int64_t step = padded_halves(dim);
  for (int64_t j = 0; j < keys; ++j)
    copy_row(rows.at(key + j), rows.col(), dim, scratch + j * step);
  return as_pairs(scratch, step);
}

// Rows of key or value as the transposed matrix [dim x keys], in pairs of consecutive keys: for
// products whose depth is the keys.
class KeyPairs {
 public:
  KeyPairs(Arena& arena, int64_t max_keys, int64_t dim)
      : dim_(dim),
        pairs_(arena.take<Pair>(padded<Pair>(pairs_in(max_keys)) * padded_halves(dim))),
        rows_(kTiles ? arena.take<Pair>(kLanes<Pair> * padded_halves(dim)) : nullptr) {}

  void read(const KeyRows<BFloat16>& rows, int64_t key, int64_t keys) {
    const int64_t step = padded_halves(dim_), pairs = pairs_in(keys);
    keys_ = keys;
    const auto zip_pair = [&](int64_t pair, Pair* to) {
      const int64_t j = key + 2 * pair;
      const BFloat16* second = j + 1 < key + keys ? rows.at(j + 1) : nullptr;
      zip_rows(rows.at(j), second, rows.col(), dim_, to);
    };
    if (!kTiles) {
      for (int64_t i = 0; i < pairs; ++i) zip_pair(i, pairs_ + i * step);
      matrix_ = {pairs_, 1, step};
      return;
    }
    // Tiles want neighbours along the depth to be neighbours in memory.
    for (int64_t i = 0; i < pairs; i += kLanes<Pair>) {
      const int64_t count = std::min<int64_t>(kLanes<Pair>, pairs - i);
      for (int64_t r = 0; r < count; ++r) zip_pair(i + r, rows_ + r * step);
      std::fill(rows_ + count * step, rows_ + kLanes<Pair> * step, Pair{});
      transpose(rows_, step, pairs_ + i, padded<Pair>(pairs), kLanes<Pair>, step);
    }
    matrix_ = {pairs_, padded<Pair>(pairs), 1};
  }

  // The matrix without the first `key` of the keys that were read; `key` is even.
  Matrix<Pair> from(int64_t key) const {
    return {matrix_.data + key / 2 * matrix_.col, matrix_.row, matrix_.col};
  }

  // How many pairs a product over keys [key, key + keys) multiplies. AMX tiles multiply whole steps
  // where nothing but zeros follows the last key.
  int64_t depth(int64_t key, int64_t keys) const {
    const int64_t pairs = pairs_in(keys), whole = padded<Pair>(pairs);
    const bool zeros = kTiles && key + keys == keys_ && key / 2 + whole <= matrix_.row;
    return zeros ? whole : pairs;
  }

 private:
  int64_t dim_;
  Pair *pairs_, *rows_;
  int64_t keys_ = 0;
  Matrix<Pair> matrix_{};
};

// Pads the right-hand operand of such a product, pairs of weights [pairs_in(keys) x lanes], with
// rows of zeros to `depth` rows.
QKV_INLINE void pad_pairs(Pair* pairs, int64_t lanes, int64_t keys, int64_t depth) {
  std::fill(pairs + pairs_in(keys) * lanes, pairs + depth * lanes, Pair{});
}

// How many rows of V^T, or of K^T, are multiplied: dim, and with AMX rows of zeros up to whole
// tiles.
constexpr int64_t product_rows(int64_t dim) { return kTiles ? padded<float>(dim) : dim; }

// A block of rows of query or grad_output in bf16: as they are, and as pairs of consecutive rows.
class RowPairs {
 public:
  RowPairs(Arena& arena, int64_t max_rows, int64_t dim)
      : dim_(dim),
        natural_(arena.take<BFloat16>(max_rows * padded_halves(dim))),
        zipped_(arena.take<Pair>(pairs_in(max_rows) * padded_halves(dim))) {}

  // Reads rows [begin, begin + valid), and adds rows of zeros up to `count`, a multiple of
  // kLanes<Pair>.
  void read(const Rows<const BFloat16>& rows, int64_t begin, int64_t valid, int64_t count) const {
    const int64_t step = padded_halves(dim_);
    for (int64_t r = 0; r < valid; ++r)
      copy_row(rows[begin + r], rows.col, dim_, natural_ + r * step);
    std::fill(natural_ + valid * step, natural_ + count * step, BFloat16{});
  }

  // to [pairs along dim x lanes] = the transpose of `lanes` rows, from row `lane` of the block on.
  void transpose_to(int64_t lane, int64_t lanes, Pair* to) const {
    const int64_t step = padded_halves(dim_);
    transpose(reinterpret_cast<const Pair*>(natural_ + lane * step), step / 2, to, lanes, lanes,
              step / 2);
  }

  // Makes pairs of consecutive rows, [count / 2 x padded_halves(dim)], of the first `count` rows.
  void zip(int64_t count) const {
    const int64_t step = padded_halves(dim_);
    for (int64_t r = 0; r < count; r += 2)
      zip_rows(natural_ + r * step, natural_ + (r + 1) * step, 1, step, zipped_ + r / 2 * step);
  }
  BFloat16* natural() const { return natural_; }  // [rows, padded_halves(dim)]
  const Pair* zipped(int64_t row) const { return zipped_ + row / 2 * padded_halves(dim_); }

 private:
  int64_t dim_;
  BFloat16* natural_;
  Pair* zipped_;
};

}  // namespace qkv::QKV_ISA
