// Fetching rows into the second-level cache before they are read or written.
//
// A core has some 20 requests to memory open, and waits with the next one. So rows are asked for a
// few at a time, while a product keeps the vector units busy: before the sums of each micro-kernel.
#pragma once

#include "kernels/simd/vec.h"

namespace qkv::QKV_ISA {

// Rows that are asked for one after the other, some lines at each call of ask().
class RowsAhead {
 public:
  void clear() { count_ = at_ = 0, lines_ = share_ = 0; }

  // Adds `rows` rows of `dim` elements, `step` elements apart. Those whose elements are not side by
  // side are left out, and so is what there is no room for.
  template <class E>
  void add(const E* data, int64_t step, int64_t col, int64_t dim, int64_t rows) {
    if (!data || col != 1 || rows <= 0 || count_ == kPieces) return;
    // Rows without a gap are one long row.
    if (step == dim) dim *= rows, rows = 1;
    const int64_t bytes = dim * int64_t(sizeof(E));
    const char* const first = reinterpret_cast<const char*>(data);
    pieces_[count_++] = {line_of(first), first + bytes, step * int64_t(sizeof(E)), bytes, rows};
    lines_ += rows * ((bytes + kLine - 1) / kLine);
  }

  // ask() will be called so many times.
  void spread(int64_t times) { share_ = (lines_ + times - 1) / times; }

  QKV_INLINE void ask() {
    if (at_ == count_) return;
    Piece piece = pieces_[at_];
    for (int64_t left = share_; left > 0; --left) {
      __builtin_prefetch(piece.at, 0, 2);
      piece.at += kLine;
      if (piece.at < piece.end) continue;
      if (--piece.rows > 0) {
        piece.end += piece.step;
        piece.at = line_of(piece.end - piece.bytes);
      } else {
        if (++at_ == count_) return;
        piece = pieces_[at_];
      }
    }
    pieces_[at_] = piece;
  }

 private:
  static constexpr int64_t kLine = kCacheLine;

  // Where the line begins that has this byte.
  static const char* line_of(const char* byte) {
    return byte - reinterpret_cast<uintptr_t>(byte) % kLine;
  }

  // Of the row that is being asked for: the next line, and its end. `rows` are left, with this one.
  struct Piece {
    const char *at, *end;
    int64_t step, bytes, rows;
  };
  // Output and queries of 8 heads that share keys and values, and these.
  static constexpr int kPieces = 18;

  Piece pieces_[kPieces];
  int count_ = 0, at_ = 0;
  int64_t lines_ = 0, share_ = 0;
};

// What a product asks for. ask() is not inlined into micro-kernels, since there are many of them.
struct Ahead {
  RowsAhead soon, later;

  __attribute__((noinline)) void ask() {
    soon.ask();
    later.ask();
    // GCC 12 takes a function that does nothing but prefetch for one without effects.
    asm volatile("");
  }
};

}  // namespace qkv::QKV_ISA
