// What a score program begins with in a tile: numbers that it is given, tables, and constants.
#pragma once

#include "kernels/operands/operands.h"
#include "kernels/score/program_steps.h"

namespace qkv::QKV_ISA {

// What a program is given of a tile [keys x lanes], by the instructions of these names. Null: it
// has no such instruction.
template <class T>
struct ProgramTile {
  const T *score = nullptr, *change = nullptr, *grad = nullptr, *grad_change = nullptr;
  const T* direction = nullptr;  // of tables; null: 0
};

// The rows of a matrix [keys x lanes] of a tile, from `row` on.
template <class T>
StepData rows_of_tile(const Tile& tile, const T* numbers, int64_t row) {
  return {const_cast<char*>(reinterpret_cast<const char*>(numbers + row * tile.step)),
          tile.step * int64_t(sizeof(T)), kVectorBytes};
}

template <class T>
class ProgramInputs {
 public:
  ProgramInputs(const Problem& p, const Tile& tile, int64_t key, const ProgramTile<T>& given)
      : p_(p), tile_(tile), key_(key), given_(given) {
    const ScoreFunction& f = *p.function;
    const int64_t row = f.items ? tile.plane.batch / f.items : 0;
    item_ = tile.plane.batch - row * f.items + p.dropout_batch;
    if (f.tables) tables_ = static_cast<const T*>(f.tables) + row * f.table_step;
    if (f.indices) indices_ = f.indices + row * f.index_step;
    if (given.direction) given_.direction += row * f.table_step;
  }

  // The tables that Op::load, or Op::load_direction, reads; null: they are 0.
  const T* table(program::Op load) const {
    return load == program::Op::load ? tables_ : given_.direction;
  }
  const int32_t* indices() const { return indices_; }

  // Steps without operands, for rows of the tile from `row` on. What is in a tile already is read
  // where it is.
  void run(const program::Instruction& x, int64_t row, const StepSize& size, StepData& to) const {
    using program::Op;
    const auto each = [&](auto f) QKV_INLINE_LAMBDA {
      for (int64_t r = 0; r < size.rows; ++r)
        for (int64_t v = 0; v < size.vectors; ++v) store(to.at<T>(r, v), (Vec<T>)f(r, v));
    };
    const auto same = [&](int64_t number)
                          QKV_INLINE_LAMBDA { return IntVec<T>{} + IntLane<T>(number); };
    const auto show = [&](const T* numbers) { to = rows_of_tile(tile_, numbers, row); };
    switch (x.op) {
      case Op::score:
        return show(given_.score);
      case Op::change:
        return show(given_.change);
      case Op::grad:
        return show(given_.grad);
      case Op::grad_change:
        return show(given_.grad_change);
      case Op::constant:
        return each([&](int64_t, int64_t) QKV_INLINE_LAMBDA {
          return x.type == program::Type::real ? splat(T(x.real)) : (Vec<T>)same(x.integer);
        });
      case Op::batch:
        return each([&](int64_t, int64_t) QKV_INLINE_LAMBDA { return same(item_); });
      case Op::head:
        return each([&](int64_t, int64_t v) QKV_INLINE_LAMBDA { return heads(v); });
      case Op::query:
        return each([&](int64_t, int64_t v) QKV_INLINE_LAMBDA { return queries(v); });
      case Op::key:
        return each([&](int64_t r, int64_t)
                        QKV_INLINE_LAMBDA { return same(key_ + row + r + p_.shard.key_offset); });
      default:
        return;
    }
  }

 private:
  // The numbers of the heads, and of the queries, of a vector of lanes.
  QKV_INLINE IntVec<T> heads(int64_t vector) const {
    const int64_t first = p_.shard.head_offset + tile_.plane.kv_head * p_.group();
    IntVec<T> all{};
    for (int l = 0; l < kLanes<T>; ++l)
      all[l] = IntLane<T>(first + (tile_.row + vector * kLanes<T> + l) % p_.group());
    return all;
  }
  QKV_INLINE IntVec<T> queries(int64_t vector) const {
    const int64_t first =
        p_.function->from_last ? p_.bottom_right() + p_.shard.key_offset : p_.shard.query_offset;
    IntVec<T> all{};
    for (int l = 0; l < kLanes<T>; ++l) {
      // Lanes without a row are given the last row's, for which tables have an element.
      const int64_t lane = std::min<int64_t>(vector * kLanes<T> + l, tile_.rows - 1);
      all[l] = IntLane<T>(first + (tile_.row + lane) / p_.group());
    }
    return all;
  }

  const Problem& p_;
  const Tile& tile_;
  const int64_t key_;
  ProgramTile<T> given_;
  int64_t item_ = 0;
  const T* tables_ = nullptr;
  const int32_t* indices_ = nullptr;
};

}  // namespace qkv::QKV_ISA
