// The best key of every row and its value.
namespace qkv::QKV_ISA {

// The first of the largest scores in each lane; NaN is larger than all others.
template <class T>
struct Best {
  Vec<T> score;
  IntVec<T> key;

  QKV_INLINE Best() : score(splat(-kInfinity<T>)), key(IntVec<T>{} - 1) {}

  QKV_INLINE void see(Vec<T> other, int64_t at) {
    // !(other <= score) also for a NaN in other; one in score stays.
    const IntVec<T> better = ~(IntVec<T>)(other <= score) & (IntVec<T>)(score == score);
    score = better ? other : score;
    key = better ? IntVec<T>{} + decltype(key[0] + 0)(at) : key;
  }
};

template <class E, class T = Compute<E>>
void write_best(const Problem& p, const HardResult& result, const Tile& tile,
                const Best<T> (&best)[2]) {
  const Rows<E> output = rows_of<E>(p, result.output, tile.batch, tile.kv_head);
  const Rows<int64_t> index = rows_of<int64_t>(p, result.index, tile.batch, tile.kv_head);
  const E* value = plane<E>(p, p.value, tile.batch, tile.kv_head);
  const Strides& v = p.value.strides;
  for (int l = 0; l < tile.rows; ++l) {
    const int64_t key = best[l / kLanes<T>].key[l % kLanes<T>];
    if (index.data) *index[tile.row + l] = key;
    if (!output.data) continue;
    for (int64_t d = 0; d < p.head_dim_v; ++d)
      output[tile.row + l][d * output.col] = key < 0 ? E{} : value[key * v.row + d * v.col];
  }
}

template <class E>
void hard(const Problem& p, const HardResult& result, const ForwardBlock& block, void* workspace) {
  using T = Compute<E>;
  Arena arena(workspace);
  ForwardScratch<Products<E>> s(arena, p, kRowBlock<T>);
  const int64_t step = key_step(p.seqlen_k);
  for (int64_t row = block.row_begin; row < block.row_end; row += kRowBlock<T>) {
    const Tile tile = make_tile<T>(p, block.batch, block.kv_head, row, block.row_end);
    s.products.pack(tile, s.tiles->query);
    Best<T> best[2];
    for (int64_t key = tile.key_begin; key < tile.key_end; key += step) {
      const int64_t keys = std::min(step, tile.key_end - key);
      s.products.load_keys(block.batch, block.kv_head, key, keys);
      s.products.scores(tile, key, keys, s.tiles->query, s.scores);
      apply_score_options<T>(p, tile, key, keys, s.scores, nullptr);
      for (int v = 0; v < tile.lanes / kLanes<T>; ++v)
        for (int64_t j = 0; j < keys; ++j)
          best[v].see(load(s.scores + j * tile.lanes + v * kLanes<T>), key + j);
    }
    write_best<E>(p, result, tile, best);
  }
}

}  // namespace qkv::QKV_ISA
