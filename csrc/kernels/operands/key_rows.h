// The rows of key or value, as the matrices that products read.
#pragma once

#include "kernels/operands/rows.h"

namespace qkv::QKV_ISA {

// A matrix with strides in elements, of which one is 1: the left-hand operand A of a product
// (gemm/tile_gemm.h).
template <class T>
struct Matrix {
  const T* data;
  int64_t row, col;

  // The matrix without its first r rows.
  Matrix from(int64_t r) const { return {data + r * row, row, col}; }
};

// Whether rows of key or value that are `row` apart, of elements `col` apart, are a Matrix where
// they lie.
inline bool lie_as_matrix(int64_t row, int64_t col) { return row == 1 || col == 1; }

// Where the rows of one plane begin, in one tensor or in pages (problem.h): row `key` at element
// at(key) of the tensor that begins at `first`.
template <class E>
struct RowPlaces {
  const E* first = nullptr;
  int64_t row = 0;
  const Pages* pages = nullptr;  // null: not in pages
  int64_t page_stride = 0;
  int64_t first_key = 0;  // as which the first row counts, not in pages

  const E* at(int64_t key) const {
    if (!pages) return first + (key - first_key) * row;
    return first + pages->table[key / pages->size] * page_stride + key % pages->size * row;
  }

  // Calls f(first, count, j) for each piece of the rows, which are `row` apart there: `count` of
  // rows [key, key + keys), from the j-th of them on, which begins at `first`. It divides once, not
  // for each piece.
  template <class F>
  QKV_INLINE void for_each_piece(int64_t key, int64_t keys, const F& f) const {
    if (!pages) return f(at(key), keys, int64_t(0));
    int64_t page = key / pages->size, begin = key % pages->size;
    for (int64_t j = 0; j < keys; ++page, begin = 0) {
      const int64_t count = std::min(keys - j, pages->size - begin);
      f(first + pages->table[page] * page_stride + begin * row, count, j);
      j += count;
    }
  }
  // to [keys] = at(key), at(key + 1), ..., a vector of addresses at a time.
  void addresses(int64_t key, int64_t keys, const E** to) const {
    constexpr int W = kLanes<double>;
    const int64_t step = row * int64_t(sizeof(E));
    IntVec<double> first_steps;
    for (int i = 0; i < W; ++i) first_steps[i] = i * step;
    for_each_piece(key, keys, [&](const E* from, int64_t count, int64_t j) QKV_INLINE_LAMBDA {
      IntVec<double> places = first_steps + reinterpret_cast<intptr_t>(from);
      int64_t i = 0;
      for (; i + W <= count; i += W, places += W * step)
        std::memcpy(to + j + i, &places, sizeof places);
      for (; i < count; ++i) to[j + i] = from + i * row;
    });
  }
};

// The scales of rows, which only int8 has (Problem::key_scale).
template <class E>
struct RowScales {};
template <>
struct RowScales<int8_t> {
  RowPlaces<float> scales_;
};

// The rows of key or value of one plane: S rows of `dim` elements of type E, in one tensor or in
// pages. It refers to the Problem, which must outlive it.
template <class E>
class KeyRows : RowScales<E> {
  using T = Compute<E>;

 public:
  KeyRows() = default;
  // `scale` is that of int8.
  KeyRows(const Problem& p, Plane plane, int64_t dim, const Input& input, int64_t page_stride = 0,
          const Input& scale = {}, int64_t scale_page_stride = 0)
      : rows_{key_plane<E>(p, input, plane), input.strides.row, pages_of(p), page_stride},
        col_(input.strides.col),
        dim_(dim),
        end_(p.seqlen_k) {
    if constexpr (std::is_same_v<E, int8_t>)
      this->scales_ = {key_plane<float>(p, scale, plane), scale.strides.row, pages_of(p),
                       scale_page_stride};
  }

  // Rows that lie in dense memory, `row` elements apart, of which the first counts as row `key`.
  KeyRows(const E* rows, int64_t key, int64_t row, int64_t dim)
      : rows_{rows, row, nullptr, 0, key}, col_(1), dim_(dim) {}

  // Rows [key, key + keys) as an operand, times their scales. They are read where they are if they
  // have the compute type and lie as a matrix in one piece, that is, in one page; else they are
  // copied to scratch [keys, padded(dim)] (copies_rows).
  Matrix<T> read(int64_t key, int64_t keys, T* scratch) const {
    if constexpr (std::is_same_v<E, T>)
      if (lie_as_matrix(row(), col_) && piece_end(key) >= key + keys) return {at(key), row(), col_};
    const int64_t step = padded<T>(dim_);
    rows_.for_each_piece(key, keys, [&](const E* from, int64_t count, int64_t first) {
      for (int64_t j = first; j < first + count; ++j, from += row()) {
        T* const to = scratch + j * step;
        fetch_ahead(key + j);
        gather_row(from, col_, dim_, to);
        if constexpr (std::is_same_v<E, int8_t>)
          for (int64_t d = 0; d < step; d += kLanes<T>)
            store(to + d, load(to + d) * *scales().at(key + j));
      }
    });
    return {scratch, step, 1};
  }

  // Of pages that have one key each: fetches the row that is read some rows after `key`, with the
  // next block of keys if need be. The hardware foresees none of them, and of a row only the later
  // lines.
  QKV_INLINE void fetch_ahead(int64_t key) const {
    constexpr int64_t kRowsAhead = 16;
    if (!rows_.pages || rows_.pages->size > 1 || col_ != 1 || key + kRowsAhead >= end_) return;
    const E* const row = at(key + kRowsAhead);
    for (int64_t d = 0; d < dim_; d += int64_t(kCacheLine / sizeof(E)))
      __builtin_prefetch(row + d, 0, 2);
  }

  const E* at(int64_t key) const { return rows_.at(key); }
  const RowPlaces<E>& places() const { return rows_; }
  const RowPlaces<float>& scales() const { return this->scales_; }  // of int8
  // Rows [key, piece_end(key)) are row() apart.
  int64_t piece_end(int64_t key) const {
    if (!rows_.pages) return std::numeric_limits<int64_t>::max();
    const int64_t size = rows_.pages->size;
    return (key / size + 1) * size;
  }
  int64_t row() const { return rows_.row; }
  int64_t col() const { return col_; }
  int64_t dim() const { return dim_; }

 private:
  static const Pages* pages_of(const Problem& p) { return p.pages.table ? &p.pages : nullptr; }

  RowPlaces<E> rows_;
  int64_t col_ = 0, dim_ = 0, end_ = 0;
};

template <class E>
KeyRows<E> key_rows(const Problem& p, Plane plane) {
  return {p, plane, p.head_dim, p.key, p.pages.key_stride, p.key_scale, p.pages.key_scale_stride};
}
template <class E>
KeyRows<E> value_rows(const Problem& p, Plane plane) {
  const Pages& pages = p.pages;
  return {
      p, plane, p.head_dim_v, p.value, pages.value_stride, p.value_scale, pages.value_scale_stride};
}

// The bytes of a call's keys and values.
template <class E>
double bytes_of_keys(const Problem& p) {
  const double keys = double(p.batch()) * double(p.kv_heads) * double(p.seqlen_k);
  return keys * double((p.head_dim + p.head_dim_v) * int64_t(sizeof(E)));
}

// Whether values are the first numbers of their keys' rows, as those of latent attention.
inline bool values_begin_keys(const Problem& p) {
  const auto same = [](const Input& a, const Input& b) {
    const Strides &x = a.strides, &y = b.strides;
    return a.data == b.data && x.batch == y.batch && x.head == y.head && x.row == y.row &&
           x.col == y.col && x.head_repeat == y.head_repeat;
  };
  const Pages& pages = p.pages;
  return same(p.key, p.value) && same(p.key_scale, p.value_scale) && p.head_dim_v <= p.head_dim &&
         pages.key_stride == pages.value_stride &&
         pages.key_scale_stride == pages.value_scale_stride;
}

// Whether KeyRows::read copies dense rows, and whether it may copy those of such a key or value:
// then it needs scratch memory.
template <class E>
constexpr bool kCopiesRows = !std::is_same_v<E, Compute<E>>;
template <class E>
bool copies_rows(const Problem& p, const Input& of) {
  return kCopiesRows<E> || p.pages.table || !lie_as_matrix(of.strides.row, of.strides.col);
}

}  // namespace qkv::QKV_ISA
