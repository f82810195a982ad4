// How products leave out hidden pairs where a factor is NaN or infinite.
//
// The weight of a hidden pair is exactly 0, but 0 * NaN and 0 * inf are NaN. So a product
// with numbers that are not finite is made of two. The first has 0 in their place. The
// second counts them: each is one of the codes below, each pair has one of the marks, and
// the sum of mark * code says what the numbers would have added to an element.
//
// A sum has no more than kKeyBlock, so 255, terms, and every term is 0 or a power of two:
// while it is below kNaNCode it is exact, and from there on only its size matters.
namespace qkv::QKV_ISA {

// A number: 0 if it is finite, else one of
constexpr int kInfinityCode = 1, kMinusInfinityCode = 1 << 8, kNaNCode = 1 << 16;

// A pair: 0 if it is hidden; kPositive if its weight is more than 0, which keeps an infinity
// what it is; kMakesNaN if not, since 0 and NaN make NaN of it.
constexpr int kPositive = 1, kMakesNaN = 1 << 16;

static_assert(kKeyBlock < kMinusInfinityCode / kInfinityCode);
static_assert(kGradRows < kMinusInfinityCode / kInfinityCode);
static_assert(kNaNCode / kMinusInfinityCode >= kMinusInfinityCode / kInfinityCode);

template <class T>
QKV_INLINE Vec<T> code_of(Vec<T> x) {
  const Vec<T> infinite = x > 0 ? splat(T(kInfinityCode)) : splat(T(kMinusInfinityCode));
  const Vec<T> code = x == x ? infinite : splat(T(kNaNCode));
  return x - x == 0 ? Vec<T>{} : code;
}

// What a sum of mark * code stands for.
template <class T>
QKV_INLINE Vec<T> meaning_of(Vec<T> sum) {
  const IntVec<T> count = __builtin_convertvector(-max<T>(splat(T(-kNaNCode)), -sum), IntVec<T>);
  const IntVec<T> below = count & (kMinusInfinityCode - 1), above = count - below;
  Vec<T> x = below != 0 ? splat(kInfinity<T>) : Vec<T>{};
  x += above != 0 ? splat(-kInfinity<T>) : Vec<T>{};  // inf - inf is NaN
  return count >= kNaNCode ? splat(std::numeric_limits<T>::quiet_NaN()) : x;
}

// to [rows x columns, to_row apart] += what sums [rows x columns], dense, stand for.
template <class T>
void add_counted(int64_t rows, int64_t columns, const T* sums, T* to, int64_t to_row) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; c += kLanes<T>) {
      T* at = to + r * to_row + c;
      store(at, load(at) + meaning_of<T>(load(sums + r * columns + c)));
    }
}

// `count` numbers of any type, a multiple of kLanes<T>.
template <class E, class T = Compute<E>>
bool all_finite(const E* x, int64_t count) {
  constexpr int kSums = 4;  // an addition's latency
  Vec<T> zero[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kLanes<T> <= count; i += kSums * kLanes<T>) {
    QKV_UNROLL
    for (int s = 0; s < kSums; ++s) zero[s] += load_wide(x + i + s * kLanes<T>) * T(0);
  }
  for (; i < count; i += kLanes<T>) zero[0] += load_wide(x + i) * T(0);
  return !any_nonzero<T>(zero[0] + zero[1] + (zero[2] + zero[3]));
}

// Rows [rows, dim] of any strides.
template <class E, class T = Compute<E>>
bool all_finite(Matrix<E> m, int64_t rows, int64_t dim) {
  if (m.col != 1 && m.row == 1) std::swap(m.row, m.col), std::swap(rows, dim);
  const int64_t whole = m.col == 1 ? dim / kLanes<T> * kLanes<T> : 0;
  T zero = 0;
  for (int64_t r = 0; r < rows; ++r) {
    if (!all_finite(m.data + r * m.row, whole)) return false;
    for (int64_t d = whole; d < dim; ++d) zero += widen(m.data[r * m.row + d * m.col]) * T(0);
  }
  return zero == 0;
}

// A run of rows or columns that holds all that is not finite.
struct Range {
  int64_t begin = 0, end = 0;

  bool empty() const { return begin >= end; }
  void include(int64_t i) { *this = empty() ? Range{i, i + 1} : Range{std::min(begin, i), std::max(end, i + 1)}; }
};

}  // namespace qkv::QKV_ISA
