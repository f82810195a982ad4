// Fetching rows into the second-level cache before they are read or written.
//
// A core has some 20 requests to memory open, and waits with the next one. So rows are asked for a
// few at a time, while a product keeps the vector units busy: before the sums of each micro-kernel.
#pragma once

#include "kernels/simd/vec.h"

namespace qkv::QKV_ISA {

class RowsAhead {
 public:
  void clear() { count_ = at_ = 0, rows_ = share_ = 0; }

  // Adds `rows` rows of `dim` elements, `step` elements apart. Those whose elements are not side by
  // side are left out, and so is what there is no room for.
  template <class E>
  void add(const E* data, int64_t step, int64_t col, int64_t dim, int64_t rows) {
    if (!data || col != 1 || rows <= 0 || count_ == kPieces) return;
    pieces_[count_++] = {reinterpret_cast<const char*>(data), step * int64_t(sizeof(E)),
                         dim * int64_t(sizeof(E)), rows};
    rows_ += rows;
  }

  // ask() will be called so many times.
  void spread(int64_t times) { share_ = (rows_ + times - 1) / times; }

  QKV_INLINE void ask() {
    for (int64_t left = share_; left > 0 && at_ < count_;) {
      Piece& piece = pieces_[at_];
      const int64_t rows = std::min(left, piece.rows);
      for (int64_t r = 0; r < rows; ++r, piece.data += piece.step)
        for (int64_t b = 0; b < piece.bytes; b += 2 * int64_t(kCacheLine)) {
          __builtin_prefetch(piece.data + b, 0, 2);
          __builtin_prefetch(piece.data + b + kCacheLine, 0, 2);
        }
      left -= rows;
      piece.rows -= rows;
      if (piece.rows == 0) ++at_;
    }
  }

 private:
  struct Piece {
    const char* data;
    int64_t step, bytes, rows;
  };
  // Output and queries of 8 heads that share keys and values, and these.
  static constexpr int kPieces = 18;

  Piece pieces_[kPieces];
  int count_ = 0, at_ = 0;
  int64_t rows_ = 0, share_ = 0;
};

// What a product asks for. It is no part of the micro-kernels, of which there are many.
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
