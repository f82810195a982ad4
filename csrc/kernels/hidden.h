// Masked pairs of rows that are NaN or infinite by right. In any other row a score
// of -inf means weight and gradient 0; in these, only for a masked pair, and only
// the reference can tell those from scores that are -inf by themselves. Rare.
namespace qkv::QKV_ISA {

template <class T>
class HiddenPairs {
 public:
  // scores [keys x lanes]; of the lanes from `lane` on in the scratch.
  HiddenPairs(const Problem& p, const Tile& tile, int64_t key, int64_t keys, const T* scores,
              const T* factor, const T* delta)
      : tile_(tile), keys_(keys) {
    for (int l = 0; l < tile.rows; ++l) {
      if ((factor[l] + delta[l]) * 0 == 0) continue;
      const int64_t row = tile.row + l, head = tile.kv_head * p.group() + row % p.group();
      for (int64_t j = 0; j < keys; ++j)
        hidden_[j * kRowBlock<T> + l] =
            scores[j * tile.step + l] == -kInfinity<T> &&
            !reference::attends(p, tile.batch, head, row / p.group(), key + j);
    }
  }

  // tile [keys x lanes] = 0 there.
  void clear(T* tile) const {
    for (int64_t j = 0; j < keys_; ++j)
      for (int l = 0; l < tile_.rows; ++l)
        if (hidden_[j * kRowBlock<T> + l]) tile[j * tile_.step + l] = 0;
  }

 private:
  const Tile& tile_;
  int64_t keys_;
  bool hidden_[kKeyBlock * kRowBlock<T>] = {};
};

}  // namespace qkv::QKV_ISA
