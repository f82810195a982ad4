// Scores of few rows by single elements, which have the compute type or get it. Pairs are
// multiplied in few_pairs.h.
#pragma once

#include "kernels/products/few_rows.h"
#include "kernels/simd/halves.h"
#include "kernels/simd/transpose.h"

namespace qkv::QKV_ISA {

// Scores of int8 keys are still to be multiplied by the keys' scales. To round only once, as those
// of other keys, they come with what the last addition has rounded off: a second matrix, kFewScores
// elements behind the first.
template <class E>
constexpr bool kHasRests = std::is_same_v<E, int8_t>;
constexpr int64_t kFewScores = kFewRows * kFewStep;

// to [N] = the lanes of x from `first` on.
template <int N, class T>
QKV_INLINE void store_lanes(T* to, const Vec<T>& x, int first) {
  if constexpr (N == kLanes<T>)
    store(to, x);
  else
    std::memcpy(to, reinterpret_cast<const T*>(&x) + first, N * sizeof(T));
}

// How many keys are taken at a time: so many that they make kFewSums sums with ROWS queries; of one
// query, what waits for loads anyway. And the next power of two, their places in store_sums.
template <class T, int ROWS>
constexpr int kFewAtOnce = ROWS == 1 ? std::max(8, kLanes<T>) : kFewSums<T> / ROWS;
constexpr int few_places_at_once(int keys) {
  int n = 1;
  while (n < keys) n *= 2;
  return n;
}

// scores[r * kFewStep + j] = the sum of all lanes of sum[r][j]. In the places beyond those keys,
// the last key is once more.
template <bool RESTS, int ROWS, int KEYS, class T>
QKV_INLINE void store_sums(const Vec<T> (&sum)[ROWS][KEYS], T* scores) {
  constexpr int W = kLanes<T>, PLACES = few_places_at_once(KEYS), N = std::min(W, PLACES);
  static_assert(ROWS * PLACES % W == 0);
  QKV_UNROLL
  for (int first = 0; first < ROWS * PLACES; first += W) {
    Vec<T> part[W], rest;
    QKV_UNROLL
    for (int i = 0; i < W; ++i)
      part[i] = sum[(first + i) / PLACES][std::min((first + i) % PLACES, KEYS - 1)];
    const Vec<T> all = RESTS ? sum_lanes<T>(part, rest) : sum_lanes<T>(part);
    QKV_UNROLL
    for (int i = 0; i < W; i += N) {
      T* const to = scores + (first + i) / PLACES * kFewStep + (first + i) % PLACES;
      store_lanes<N>(to, all, i);
      if constexpr (RESTS) store_lanes<N>(to + kFewScores, rest, i);
    }
  }
}

// How dot_single_rows multiplies: by single elements, which have the compute type or get it. The
// counterpart for pairs is FewPairs (few_pairs.h).
template <class E>
struct FewElements {
  using Key = E;             // of a row of keys
  using Query = Compute<E>;  // of a query, packed
  using Sum = Compute<E>;
  using Factor = Vec<Sum>;                   // what is multiplied
  static constexpr int kStep = kLanes<Sum>;  // elements of a factor
  static constexpr bool kRests = kHasRests<E>;

  // Factor v of N that lie one behind the other.
  template <int v, int N>
  static QKV_INLINE Factor key(const E* row) {
    constexpr bool in_parts = kInParts<E> && N > 1;
    return load_part<in_parts ? v % 2 : -1>(row + (in_parts ? v / 2 * 2 : v) * kStep);
  }
  static QKV_INLINE Factor query(const Query* from) { return load(from); }
  static QKV_INLINE Factor add(Factor sum, Factor key, Factor query) { return sum + key * query; }
};

// scores[r * kFewStep + j] = the dot product of query r with key j, for up to kVeryFew queries,
// packed as [dim / kStep, ROWS, kStep]. Keys are read one row after the other, as a CPU foresees
// it: float32 from memory takes 0.7 to 0.9 of the time of dot_rows with one query (Zen 5).
template <class By, int ROWS, class Sum = typename By::Sum>
__attribute__((noinline)) void dot_single_rows(int64_t dim, FewPlaces<typename By::Key> keys,
                                               const typename By::Query* query, Sum* scores) {
  constexpr int KEYS = kFewAtOnce<Sum, ROWS>, STEP = By::kStep;
  constexpr int N = kRegisters / 4 / ROWS;  // steps of which queries are held in registers
  static_assert(N % 2 == 0, "parts of elements come in pairs");
  const auto* const* const end = keys.rows + keys.count;
  for (; keys.rows < end; keys.rows += KEYS, scores += KEYS) {
    Vec<Sum> sum[ROWS][KEYS] = {};
    const auto add = [&](int64_t first, auto count) QKV_INLINE_LAMBDA {
      typename By::Factor held[count][ROWS];
      for_each_constant<count * ROWS>([&](auto i) QKV_INLINE_LAMBDA {
        held[i / ROWS][i % ROWS] = in_register(By::query(query + (first * ROWS + i) * STEP));
      });
      QKV_UNROLL
      for (int j = 0; j < KEYS; ++j) {
        fetch<count * STEP>(keys.rows[keys.ahead + j] + first * STEP);
        const auto* const row = keys.rows[j] + first * STEP;
        for_each_constant<count>([&](auto v) QKV_INLINE_LAMBDA {
          auto key = By::template key<v, count>(row);
          if constexpr (ROWS > 1) key = in_register(key);
          QKV_UNROLL
          for (int r = 0; r < ROWS; ++r) sum[r][j] = By::add(sum[r][j], key, held[v][r]);
        });
      }
    };
    in_steps<N, N / 2, std::max(1, N / 4), 1>((dim + STEP - 1) / STEP, add);
    store_sums<By::kRests>(sum, scores);
  }
}

// Likewise for more queries, which are loaded once for some keys.
template <class E, int ROWS, class T = Compute<E>>
__attribute__((noinline)) void dot_rows(int64_t dim, FewPlaces<E> keys, FewAhead<E>& ahead,
                                        const T* query, T* scores) {
  constexpr int W = kLanes<T>, KEYS = kFewAtOnce<T, ROWS>;
  const E* const* const end = keys.rows + keys.count;
  for (; keys.rows < end; keys.rows += KEYS, scores += KEYS) {
    ahead.step();
    Vec<T> sum[ROWS][KEYS];
    const E* row[KEYS];
    QKV_UNROLL
    for (int j = 0; j < KEYS; ++j) {
      row[j] = keys.rows[j];
      QKV_UNROLL
      for (int r = 0; r < ROWS; ++r) sum[r][j] = Vec<T>{};
    }
    const auto add = [&](int64_t d, auto half) QKV_INLINE_LAMBDA {
      const T* const q = query + (d + (half > 0 ? W : 0)) * ROWS;
      Vec<T> k[KEYS];
      QKV_UNROLL
      for (int j = 0; j < KEYS; ++j) k[j] = in_register(load_part<half>(row[j] + d));
      QKV_UNROLL
      for (int r = 0; r < ROWS; ++r) {
        const Vec<T> x = in_register(load(q + r * W));
        QKV_UNROLL
        for (int j = 0; j < KEYS; ++j) sum[r][j] += k[j] * x;
      }
    };
    int64_t d = 0;
    if constexpr (kInParts<E>) {  // with both halves in one loop, sums would be spilled (GCC 12)
      for (; d + 2 * W <= dim; d += 2 * W) add(d, std::integral_constant<int, 0>());
      for (d = 0; d + 2 * W <= dim; d += 2 * W) add(d, std::integral_constant<int, 1>());
    }
    for (; d < dim; d += W) add(d, std::integral_constant<int, -1>());
    ahead.step();
    store_sums<kHasRests<E>>(sum, scores);
  }
}

// Packs rows [row, row + rows), of `dim` numbers each, times scale, for keys of K: portion after
// portion [dim / W, rows of the portion, W], the elements in the order in which load_part reads
// them.
template <class E, class K = E, class T = Compute<E>>
void pack_few_elements(const Rows<const E>& from, int64_t row, int64_t rows, int64_t dim, T scale,
                       T* query) {
  constexpr int W = kLanes<T>;
  for_each_portion<kFewPortion<T>>(rows, [&](int64_t first, auto count) {
    for (int r = 0; r < count; ++r)
      for (int64_t d = 0; d < dim; d += 2 * W) {
        T part[2 * W];
        const int64_t n = std::min<int64_t>(2 * W, dim - d);
        const E* const at = from[row + first + r] + d * from.col;
        for (int64_t i = 0; i < n; i += W)
          from.col == 1 ? store(part + i, load_wide(at + i))
                        : gather_row(at + i * from.col, from.col, W, part + i);
        if (n == 2 * W) to_parts<K>(part);
        for (int64_t i = 0; i < n; i += W)
          store(query + first * dim + (d + i) * count + r * W, load(part + i) * scale);
      }
  });
}

// scores [rows x keys] = the scores of the queries of pack_few_elements.
template <class E, class T = Compute<E>>
void few_scores_by_elements(int64_t rows, int64_t dim, FewPlaces<E> keys, const T* query,
                            T* scores) {
  in_turns(
      keys, dim, [&](const auto& dots) { for_each_portion<kFewPortion<T>>(rows, dots); },
      [&](int64_t count, auto portion) {
        constexpr int KEYS = kFewAtOnce<T, portion>;
        return portion > kVeryFew ? 2 * ((count + KEYS - 1) / KEYS) : 0;
      },
      [&](FewPlaces<E> some, FewAhead<E>& ahead, int64_t at, int64_t r, auto portion) {
        T* const to = scores + r * kFewStep + at;
        if constexpr (portion <= kVeryFew)
          dot_single_rows<FewElements<E>, portion>(dim, some, query + r * dim, to);
        else
          dot_rows<E, portion>(dim, some, ahead, query + r * dim, to);
      });
}

}  // namespace qkv::QKV_ISA
