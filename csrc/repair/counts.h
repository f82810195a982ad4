// How products leave out hidden pairs where a factor is NaN or infinite.
//
// The weight of a hidden pair is exactly 0, but 0 * NaN and 0 * inf are NaN. So a product
// with numbers that are not finite is parted into two. The first has 0 in their place. The
// second counts them: each number has one of the codes below, each pair one of the marks,
// and the sum of mark * code says what the numbers would have added to an element.
//
// Such a sum has at most kKeyBlock or kGradRows terms, and every term is 0 or a power of
// two: it is exact while it is less than kNaNCode, and from there on it only grows.
namespace qkv::QKV_ISA {

// A number: 0 if it is finite, else one of
constexpr int kInfinityCode = 1, kMinusInfinityCode = 1 << 8, kNaNCode = 1 << 16;

// A pair: 0 if it is hidden; kPositive if its weight is more than 0, which keeps an infinity
// what it is; kMakesNaN if not, since 0 and NaN make NaN of it.
constexpr int kPositive = 1, kMakesNaN = 1 << 16;

static_assert(kKeyBlock < kMinusInfinityCode && kGradRows < kMinusInfinityCode);
static_assert(kMinusInfinityCode * kMinusInfinityCode <= kNaNCode);

// Which infinities are told from NaN: of values and grad_output, which weights multiply. Keys
// and queries that are not finite make NaN or nothing of the weights, and always NaN of the
// gradients of scores or of their products.
enum class Infinities { kept, as_nan };

template <Infinities infinities, class T>
QKV_INLINE Vec<T> code_of(Vec<T> x) {
  Vec<T> code = splat(T(kNaNCode));
  if constexpr (infinities == Infinities::kept) {
    const Vec<T> infinite = x > 0 ? splat(T(kInfinityCode)) : splat(T(kMinusInfinityCode));
    code = x == x ? infinite : code;
  }
  return x - x == 0 ? Vec<T>{} : code;
}

// What a sum of mark * code stands for; -0 for 0, which changes no number that it is added to.
template <Infinities infinities, class T>
QKV_INLINE Vec<T> meaning_of(Vec<T> sum) {
  const Vec<T> nan = splat(std::numeric_limits<T>::quiet_NaN());
  if (infinities == Infinities::as_nan) return sum > 0 ? nan : splat(T(-0.));
  const IntVec<T> count = __builtin_convertvector(-max<T>(splat(T(-kNaNCode)), -sum), IntVec<T>);
  const IntVec<T> positive = count & (kMinusInfinityCode - 1);
  Vec<T> x = positive != 0 ? splat(kInfinity<T>) : splat(T(-0.));
  x -= count != positive ? splat(kInfinity<T>) : Vec<T>{};  // inf - inf is NaN
  return count >= kNaNCode ? nan : x;
}

// to [count] += what sums stand for; count: a multiple of kLanes<T>.
template <Infinities infinities, class T>
void add_counted(int64_t count, const T* sums, T* to) {
  for (int64_t i = 0; i < count; i += kLanes<T>)
    store(to + i, load(to + i) + meaning_of<infinities, T>(load(sums + i)));
}

// Whether sums [count], a multiple of kLanes<T>, are all NaN: nothing that is added changes them.
template <class T>
bool all_nan(const T* sums, int64_t count) {
  if (count > 0 && sums[0] == sums[0]) return false;  // most often
  Vec<T> numbers{};
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    const Vec<T> x = load(sums + i);
    numbers += x == x ? splat(T(1)) : Vec<T>{};
  }
  return !any_nonzero<T>(numbers);
}

// Numbers [count], a multiple of kLanes<T>, get their codes, and those that are not finite
// become 0. Whether there are some.
template <Infinities infinities, class E, class T = Compute<E>>
bool part_numbers(int64_t count, E* x, T* codes) {
  Vec<T> all{};
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    const Vec<T> number = load_wide(x + i), code = code_of<infinities, T>(number);
    store_narrow(x + i, code == 0 ? number : Vec<T>{});
    store(codes + i, code);
    all += code;
  }
  return any_nonzero<T>(all);
}

// Whether numbers [count], a multiple of kLanes<T>, are all finite.
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

// The same of rows [rows, dim] of any strides.
template <class E, class T = Compute<E>>
bool all_finite(Matrix<E> m, int64_t rows, int64_t dim) {
  if (m.col != 1 && m.row == 1) return all_finite(Matrix<E>{m.data, m.col, 1}, dim, rows);
  const int64_t whole = m.col == 1 ? dim / kLanes<T> * kLanes<T> : 0;
  T zero = 0;
  for (int64_t r = 0; r < rows; ++r) {
    if (!all_finite(m.data + r * m.row, whole)) return false;
    for (int64_t d = whole; d < dim; ++d) zero += widen(m.data[r * m.row + d * m.col]) * T(0);
  }
  return zero == 0;
}

// A run of rows that holds all that are not finite.
struct Range {
  int64_t begin = 0, end = 0;

  bool empty() const { return begin == end; }
  void include(int64_t i) {
    if (empty()) begin = i;
    end = i + 1;  // they come in order
  }
};

}  // namespace qkv::QKV_ISA
