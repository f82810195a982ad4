// A tile: up to kRowBlock<T> rows, one a lane, against a run of keys.
namespace qkv::QKV_ISA {

template <class T>
constexpr int kRowBlock = 2 * kLanes<T>;

// Keys that a product takes at once: full micro-kernels, or full tiles of AMX. A block of keys is a
// multiple of it, since what is left over costs as much as a whole step.
#ifdef QKV_PAIR_GEMM
constexpr int kKeyStep = kPairRows;
#else
constexpr int kKeyStep = kMaxRows[1];
#endif

// Keys of a tile, at most: enough that reading and writing the output tile once
// a block is cheap, few enough that the tile of scores stays in the first-level
// cache beside the operands, and, but for tiles, no more than one chain of additions takes.
constexpr int kKeyBlock =
    kKeyStep == kMaxRows[1] ? kDepthBlock / kKeyStep * kKeyStep : 128 / kKeyStep * kKeyStep;

// Keys of the tiles that `keys` keys are cut into: equal, and full steps.
inline int64_t key_step(int64_t keys) {
  const int64_t blocks = std::max<int64_t>(1, (keys + kKeyBlock - 1) / kKeyBlock);
  const int64_t steps = (keys + blocks * kKeyStep - 1) / (blocks * kKeyStep);
  return std::max<int64_t>(1, steps) * kKeyStep;
}

struct Tile {
  int64_t batch, kv_head;
  int64_t row;    // of the first lane
  int rows;       // lanes in use
  int lanes;      // one or two vectors
  int64_t step;   // elements from one key to the next in a tile of scores
  int64_t first;  // query position of the first lane
  int64_t last;   // and of the last in use
  // The keys that any of its rows may see: empty if they cross.
  int64_t key_begin, key_end;
};

template <class T>
Tile make_tile(const Problem& p, int64_t batch, int64_t kv_head, int64_t row, int64_t row_end,
               int64_t step = 0) {
  const int rows = int(std::min<int64_t>(kRowBlock<T>, row_end - row));
  const int lanes = rows <= kLanes<T> ? kLanes<T> : 2 * kLanes<T>;
  const int64_t first = row / p.group(), last = (row + rows - 1) / p.group();
  return {batch,
          kv_head,
          row,
          rows,
          lanes,
          step ? step : lanes,
          first,
          last,
          key_begin(p, first),
          key_end(p, last)};
}

// The query position of each lane of a vector, counted from the tile's first.
template <class T>
Vec<T> positions(const Problem& p, const Tile& tile, int vector) {
  Vec<T> v{};
  for (int l = 0; l < kLanes<T>; ++l)
    v[l] = T((tile.row + vector * kLanes<T> + l) / p.group() - tile.first);
  return v;
}

// One number a row, from a [B..., H] tensor of doubles.
template <class T>
Vec<T> per_head(const Problem& p, const Tile& tile, const Input& input, int vector) {
  Vec<T> v{};
  for (int l = 0; l < kLanes<T>; ++l) {
    const int64_t head = (tile.row + vector * kLanes<T> + l) % p.group();
    v[l] = T(*plane<double>(p, input, tile.batch, tile.kv_head * p.group() + head));
  }
  return v;
}

// query [D x lanes] = the tile's queries times scale; `rows` is scratch for them.
template <class E, class T = Compute<E>>
void pack_queries(const Problem& p, const Tile& tile, T* rows, T* query) {
  const int64_t dim = padded<T>(p.head_dim);
  gather_rows(rows_of<E>(p, p.query, tile.batch, tile.kv_head), tile.row, tile.rows, tile.lanes,
              p.head_dim, rows);
  transpose<T>(rows, dim, query, tile.lanes, tile.lanes, dim, T(p.scale));
}

}  // namespace qkv::QKV_ISA
