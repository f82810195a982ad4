// What an option of the scores is: a struct derived from ScoreOption, with functions for what it
// does to a tile of scores and to their derivatives. score.h lists the options, in the order of the
// formula in problem.h, and every pass goes through that list.
//
// Tiles are [keys x lanes], of the keys [key, key + keys), and change in place: "before" and
// "after" are what an option is given and what it makes of that, and so is the end of another one's
// work the beginning of the next one's.
#pragma once

#include "attention_jvp.h"
#include "kernels/operands/tile.h"

namespace qkv::QKV_ISA {

// A tile of scratch memory for each option of the list that needs one; null for the others.
template <class T, int N>
struct OptionTiles {
  T* tiles[N] = {};

  T* operator[](int option) const { return tiles[option]; }
  // The same from element n of each on.
  OptionTiles at(int64_t n) const {
    OptionTiles moved;
    for (int i = 0; i < N; ++i) moved.tiles[i] = tiles[i] ? tiles[i] + n : nullptr;
    return moved;
  }
};

template <class Option>
struct ScoreOption {
  // Whether derivatives need a number for each score, which apply leaves in a tile `kept`. Those of
  // the second order then get the changes of the scores before as well. Such an option changes
  // gradients; of one without, which adds to scores, they are the same before and after.
  static constexpr bool kKeeps = false;

  // Each option has is_set(p), whether the problem has it, and apply(p, tile, key, keys, scores,
  // kept), which changes scores; kept is null if there will be no derivatives.

  // Whether it changes a score of these keys.
  static bool changes(const Problem& p, const Tile&, int64_t, int64_t) { return Option::is_set(p); }
  // Whether the numbers of the option themselves have a direction.
  static bool moves(const JvpArgs&) { return false; }
  // change: how the scores change, before and after.
  template <class T>
  static void jvp(const Problem&, const JvpArgs&, const Tile&, int64_t, int64_t, const T*, T*) {}
  // grad_scores: the gradients of the scores, after and before. Adds those of the option's own
  // numbers to where they are wanted.
  template <class T>
  static void backward(const Problem&, const BackwardArgs&, const BackwardItem&, const Tile&,
                       int64_t, int64_t, const T*, T*) {}
  // What the second derivative makes of both: first, the gradients of the scores, and second, their
  // changes, where the scores before change by `change`.
  template <class T>
  static void double_backward(const Problem& p, const BackwardArgs& a, const BackwardItem& item,
                              const Tile& tile, int64_t key, int64_t keys, const T* kept, const T*,
                              T*, T* second) {
    static_assert(!Option::kKeeps);
    Option::backward(p, a, item, tile, key, keys, kept, second);
  }
};

}  // namespace qkv::QKV_ISA
