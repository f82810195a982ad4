// The user's rows as what a pass asks for before it reads or writes them (gemm/rows_ahead.h).
#pragma once

#include "kernels/gemm/rows_ahead.h"
#include "kernels/operands/key_rows.h"
#include "kernels/operands/tile.h"

namespace qkv::QKV_ISA {

// Whether an item of `count` rows has anything to ask for: not if it is a single tile, and the keys
// and values of the call are at most so many bytes. A cache may still hold them, and what is
// computed with them; then 64 x 4 heads of 16 x 16 x 32, whose keys and values take 1 MiB, lose 12
// % forward and 5 % backward by asking. Where memory alone holds them they take 0.57 and 0.63 of
// the time (one thread of a Zen 5). T is what is computed with, K what keys and values are in
// memory.
template <class T, class K>
bool asks_ahead(const Problem& p, int64_t count, double near_bytes) {
  return count > kTileRows<T> || bytes_of_keys<K>(p) > near_bytes;
}

// Adds rows [begin, end) of a plane, one head of the group after the other.
template <class E>
void add_rows(const Rows<E>& rows, int64_t begin, int64_t end, int64_t dim, RowsAhead& to) {
  const int64_t count = end - begin;
  for (int64_t head = 0; rows.data && head < std::min(rows.group, count); ++head)
    to.add(rows[begin + head], rows.row, rows.col, dim,
           (count - head + rows.group - 1) / rows.group);
}

// Adds rows [key, end) of key or value.
template <class K>
void add_keys(const KeyRows<K>& rows, int64_t key, int64_t end, RowsAhead& to) {
  rows.places().for_each_piece(key, end - key, [&](const K* first, int64_t count, int64_t) {
    to.add(first, rows.row(), rows.col(), rows.dim(), count);
  });
}

}  // namespace qkv::QKV_ISA
