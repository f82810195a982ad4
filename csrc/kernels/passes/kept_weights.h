// The weights of a tile themselves, for callers who want to see them.
//
// Where they are wanted, the scores of all keys stay in memory and become weights there, block
// after block, relative to the largest score so far, as the output does. At the end they are
// divided by the same sum. So they cost no second product and no second exponential.
#pragma once

#include "kernels/score/dropout.h"
#include "repair/marks.h"

namespace qkv::QKV_ISA {

template <class T>
class KeptWeights {
 public:
  KeptWeights() = default;
  // memory: size() elements; null: the weights are not wanted.
  explicit KeptWeights(T* memory) : memory_(memory) {}

  // One block more than there are keys, since products may write whole blocks.
  static int64_t size(const Problem& p) { return (p.seqlen_k + kKeyBlock) * kTileRows<T>; }

  bool are_wanted() const { return memory_; }

  // Makes room for the scores of keys [key, key + keys), and returns where: in this memory, or, if
  // the weights are not wanted, at `elsewhere`. Keys come in ascending order, and those that are
  // left out between them have weights of 0.
  T* extend(const Tile& tile, int64_t key, int64_t keys, T* elsewhere) {
    if (!memory_) return elsewhere;
    if (end_ == 0) begin_ = end_ = key;
    std::fill(memory_ + end_ * tile.step, memory_ + key * tile.step, T(0));
    end_ = key + keys;
    return memory_ + key * tile.step;
  }

  // Multiplies the weights of the keys before `key` by factors [lanes], the `rescale` of
  // softmax_tile, which hardly ever is anything but 1, or that of softmax_pairs.
  void rescale(const Tile& tile, int64_t key, const T* factors) {
    if (!memory_ || begin_ == key) return;
    for (int v = 0; v < tile.lanes; v += kLanes<T>) {
      const Vec<T> factor = load(factors + v);
      if (!any_nonzero<T>(factor - 1)) continue;
      scale(tile, begin_, key, v, factor);
    }
  }

  // Adds ForwardResult::weights_factor * factors [lanes] * weights to the user's. marks [kKeyBlock
  // x lanes] is scratch memory.
  void add_to(const Problem& p, const ForwardResult& result, const Tile& tile, const T* factors,
              T* marks) {
    if (end_ == 0) return;
    T all[kTileRows<T>];
    Vec<T> zero{};
    for (int v = 0; v < tile.lanes; v += kLanes<T>) {
      const Vec<T> factor = load(factors + v) * T(result.weights_factor);
      zero += factor * 0;
      store(all + v, factor);
    }
    const bool is_finite = !any_nonzero<T>(zero);
    if (!is_finite && hides_any(p)) clear_hidden(p, tile, all, marks);
    add_tile<T>(score_rows_of<T>(p, result.weights, tile.plane), tile, begin_, end_ - begin_,
                memory_ + begin_ * tile.step, all);
  }

 private:
  void scale(const Tile& tile, int64_t begin, int64_t end, int lane, Vec<T> factor) {
    for (T* at = memory_ + begin * tile.step + lane; begin < end; ++begin, at += tile.step)
      store(at, load(at) * factor);
  }

  // Rows that may see a NaN have weights that are NaN, all of them; those of hidden pairs are 0 all
  // the same. The factors are applied here, and become 1.
  void clear_hidden(const Problem& p, const Tile& tile, T* factors, T* marks) {
    for (int v = 0; v < tile.lanes; v += kLanes<T>) {
      scale(tile, begin_, end_, v, load(factors + v));
      store(factors + v, splat(T(1)));
    }
    for (int64_t key = begin_; key < end_; key += kKeyBlock) {
      T* const weights = memory_ + key * tile.step;
      mark_pairs<T, 1>(p, tile, key, std::min<int64_t>(kKeyBlock, end_ - key), weights, tile.step,
                       marks, {weights});
    }
  }

  T* memory_ = nullptr;          // [S + kKeyBlock, lanes]
  int64_t begin_ = 0, end_ = 0;  // the keys from the first to the last that were seen; none if 0
};

}  // namespace qkv::QKV_ISA
