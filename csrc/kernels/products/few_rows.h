// Products for planes of few rows, as in decoding. Here a vector runs along the head dimension, so
// that each element of a key and of a value is loaded once for all rows. With a row in each lane,
// as elsewhere, most lanes would be idle, and every element would have to be broadcast.
//
// Here are the scores; the sums of values are in few_values.h. Numbers of 16 bits may be multiplied
// in pairs (few_words.h).
//
// Scores and weights of a block of keys are a matrix [rows x keys], of which rows are kFewStep
// elements apart: so the softmax has keys in its lanes (score/few_softmax.h).
#pragma once

#include "kernels/products/few_ahead.h"
#include "kernels/simd/halves.h"
#include "kernels/simd/transpose.h"

namespace qkv::QKV_ISA {

// How many sums a product has in registers: all but four, which hold what is multiplied, and no
// more than 16. Eight keep two FMA units of latency 4 busy, but just so: sums of values by twelve
// are 1.1 times as fast on a Zen 3.
template <class T>
constexpr int kFewSums = std::max<int>(kLanes<T>, std::min(kRegisters - 4, 16));

// Whether a problem is computed in this way. Where bits are fixed, int8 keys are not: their scores
// are rounded as those of tiles are, whose keys are multiplied by their scales.
template <class E>
bool has_few_rows(const Problem& p) {
  return !(kFixedBits && p.is_int8()) && few_rows_of(p, kLanes<Compute<E>>, kTiles && kInPairs<E>);
}
// Whether passes after the forward pass make the scores in this way. Where bits are fixed, they are
// those of tiles, which other passes make anyway.
template <class E>
bool has_few_scores(const Problem& p) {
  return !kFixedBits && has_few_rows<E>(p);
}

// Calls f(row, rows) for `rows` rows in portions of 8, 4, 2 and 1, no larger than MAX: the size of
// each portion is known when compiling.
template <int MAX, class F>
QKV_INLINE void for_each_portion(int64_t rows, const F& f) {
  if constexpr (MAX >= 8)
    in_steps<8, 4, 2, 1>(rows, f);
  else
    in_steps<4, 2, 1>(rows, f);
}
// With more rows at once there would be no registers for two keys, or two vectors of values.
template <class T>
constexpr int kFewPortion = std::min(kFewSums<T>, kRegisters / 4);

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

// f(0), f(1), ... f(N - 1), constants.
template <int N, int I = 0, class F>
QKV_INLINE void for_each_constant(const F& f) {
  if constexpr (I < N) {
    f(std::integral_constant<int, I>());
    for_each_constant<N, I + 1>(f);
  }
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

// How dot_held_rows multiplies: by single elements, which have the compute type or get it. The
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

// scores[r * kFewStep + j] = the dot product of query r with key j, for up to kFewHeld queries,
// packed as [dim / kStep, ROWS, kStep]. Keys are read one row after the other, as a CPU foresees
// it: float32 from memory takes 0.7 to 0.9 of the time of dot_rows with one query (Zen 5).
template <class By, int ROWS, class Sum = typename By::Sum>
__attribute__((noinline)) void dot_held_rows(int64_t dim, FewPlaces<typename By::Key> keys,
                                             const typename By::Query* query, Sum* scores) {
  constexpr int KEYS = kFewAtOnce<Sum, ROWS>, N = kRegisters / 4 / ROWS, STEP = By::kStep;
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

// Calls dots(keys, ahead, r, count, at) for each portion of `rows` rows, from row r on, and for
// some of the keys at a time, whose scores begin at element `at`. More than kFewHeld rows call
// ahead.step() `steps` times for each at_once(count) keys.
template <class T, class E, class AtOnce, class Dots>
QKV_INLINE void dot_portions(int64_t rows, int64_t dim, FewPlaces<E> keys, int64_t steps,
                             const AtOnce& at_once, const Dots& dots) {
  in_turns(
      keys, dim, [&](const auto& g) { for_each_portion<kFewPortion<T>>(rows, g); },
      [&](int64_t keys, auto count) {
        return count > kFewHeld ? steps * ((keys + at_once(count) - 1) / at_once(count)) : 0;
      },
      [&](FewPlaces<E> some, FewAhead<E>& ahead, int64_t key, int64_t r, auto count) {
        dots(some, ahead, r, count, r * kFewStep + key);
      });
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
  const auto at_once = [](auto count) { return kFewAtOnce<T, count>; };
  const auto dots = [&](FewPlaces<E> some, FewAhead<E>& ahead, int64_t r, auto count, int64_t at) {
    if constexpr (count <= kFewHeld)
      dot_held_rows<FewElements<E>, count>(dim, some, query + r * dim, scores + at);
    else
      dot_rows<E, count>(dim, some, ahead, query + r * dim, scores + at);
  };
  dot_portions<T>(rows, dim, keys, 2, at_once, dots);
}

}  // namespace qkv::QKV_ISA
