// The list of the options of the scores, and what passes do with it. A new option is a header like
// softcap.h and its name in ScoreOptions.
#pragma once

#include "kernels/score/alibi.h"
#include "kernels/score/masks.h"
#include "kernels/score/option.h"
#include "kernels/score/program.h"
#include "kernels/score/softcap.h"

namespace qkv::QKV_ISA {

template <class... Options>
struct OptionList {
  static constexpr int kSize = sizeof...(Options);

  // Calls each(option, its number) in order.
  template <class Each>
  QKV_INLINE static void forward(const Each& each) {
    int number = 0;
    (each(Options(), number++), ...);
  }
  // The same from the last to the first.
  template <class Each>
  QKV_INLINE static void backward(const Each& each) {
    from_last(each, 0, Options()...);
  }
  // Whether holds(option) for any of them.
  template <class Holds>
  QKV_INLINE static bool any(const Holds& holds) {
    return (holds(Options()) || ...);
  }

 private:
  template <class Each, class First, class... Rest>
  QKV_INLINE static void from_last(const Each& each, int number, First first, Rest... rest) {
    if constexpr (sizeof...(Rest) > 0) from_last(each, number + 1, rest...);
    each(first, number);
  }
};

// In the order of the formula in problem.h.
using ScoreOptions = OptionList<Softcap, Program, Alibi, Masks>;
template <class T>
using ScoreTiles = OptionTiles<T, ScoreOptions::kSize>;

// Memory of `size` numbers for each option that keeps some (ScoreOption::kKeeps).
template <class T>
ScoreTiles<T> take_score_tiles(Arena& arena, const Problem& p, int64_t size) {
  ScoreTiles<T> taken;
  ScoreOptions::forward([&](auto option, int i) {
    if (option.kKeeps && option.is_set(p)) taken.tiles[i] = arena.take<T>(size);
  });
  return taken;
}

// Whether apply_score_options changes a score of these keys.
inline bool changes_scores(const Problem& p, const Tile& tile, int64_t key, int64_t keys) {
  return ScoreOptions::any([&](auto option) { return option.changes(p, tile, key, keys); });
}

// Whether gradients of scores are others before the options than after them.
inline bool changes_gradients(const Problem& p) {
  return ScoreOptions::any([&](auto option) { return option.kKeeps && option.is_set(p); });
}

// Whether scores change along these directions.
inline bool moves_scores(const JvpArgs& a) {
  return a.query.data || a.key.data ||
         ScoreOptions::any([&](auto option) { return option.moves(a); });
}

// scores [keys x lanes]: dot products times scale before, scores after. kept: see
// ScoreOption::kKeeps; without, there will be no derivatives.
template <class T>
void apply_score_options(const Problem& p, const Tile& tile, int64_t key, int64_t keys, T* scores,
                         const ScoreTiles<T>& kept = {}) {
  ScoreOptions::forward([&](auto option, int i) {
    if (option.is_set(p)) option.apply(p, tile, key, keys, scores, kept[i]);
  });
}

// change [keys x lanes]: of the dot products times scale before, of the scores after. changes,
// where they are not null, get what score_options_double_backward needs.
template <class T>
void score_options_jvp(const Problem& p, const JvpArgs& a, const Tile& tile, int64_t key,
                       int64_t keys, const ScoreTiles<T>& kept, T* change,
                       const ScoreTiles<T>& changes = {}) {
  ScoreOptions::forward([&](auto option, int i) {
    for (int64_t j = 0; changes[i] && j < keys; ++j)
      std::copy_n(change + j * tile.step, tile.lanes, changes[i] + j * tile.step);
    if (option.is_set(p)) option.jvp(p, a, tile, key, keys, kept[i], change);
  });
}

// grad_scores [keys x lanes]: the gradients of the scores before, of the dot products times scale
// after.
template <class T>
void score_options_backward(const Problem& p, const BackwardArgs& a, const BackwardItem& item,
                            const Tile& tile, int64_t key, int64_t keys, const ScoreTiles<T>& kept,
                            T* grad_scores) {
  ScoreOptions::backward([&](auto option, int i) {
    if (option.is_set(p)) option.backward(p, a, item, tile, key, keys, kept[i], grad_scores);
  });
}

// The same for gradients, `first`, and their changes, `second`.
template <class T>
void score_options_double_backward(const Problem& p, const BackwardArgs& a,
                                   const BackwardItem& item, const Tile& tile, int64_t key,
                                   int64_t keys, const ScoreTiles<T>& kept,
                                   const ScoreTiles<T>& changes, T* first, T* second) {
  ScoreOptions::backward([&](auto option, int i) {
    if (option.is_set(p))
      option.double_backward(p, a, item, tile, key, keys, kept[i], changes[i], first, second);
  });
}

}  // namespace qkv::QKV_ISA
