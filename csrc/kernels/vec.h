// Vectors of kVectorBytes (isa/<name>/vec.h) through compiler extensions:
// + - * < and friends are the language's own operators.
namespace qkv::QKV_ISA {

template <class T>
struct VecTraits;

template <>
struct VecTraits<float> {
  typedef float Vec __attribute__((vector_size(kVectorBytes)));
  typedef float Unaligned __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
  typedef int32_t Int __attribute__((vector_size(kVectorBytes)));
};

template <>
struct VecTraits<double> {
  typedef double Vec __attribute__((vector_size(kVectorBytes)));
  typedef double Unaligned __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
  typedef int64_t Int __attribute__((vector_size(kVectorBytes)));
};

template <class T>
using Vec = typename VecTraits<T>::Vec;
template <class T>
using IntVec = typename VecTraits<T>::Int;

template <class T>
constexpr int kLanes = kVectorBytes / sizeof(T);

template <class T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

template <class T>
QKV_INLINE Vec<T> load(const T* p) {
  return *reinterpret_cast<const typename VecTraits<T>::Unaligned*>(p);
}

template <class T>
QKV_INLINE void store(T* p, Vec<T> v) {
  *reinterpret_cast<typename VecTraits<T>::Unaligned*>(p) = v;
}

template <class T>
QKV_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};  // not x + {}: -0.0 must stay
}

// 0, 1, 2, ...
template <class T>
QKV_INLINE IntVec<T> iota() {
  IntVec<T> v{};
  QKV_UNROLL
  for (int i = 0; i < kLanes<T>; ++i) v[i] = i;
  return v;
}

// One instruction on x86. A NaN in b is returned, one in a is not.
template <class T>
QKV_INLINE Vec<T> max(Vec<T> a, Vec<T> b) {
  return a > b ? a : b;
}

// 2^t for t <= 127 (f64: 1023), at most 2 ulp off; 0 below the normal range,
// NaN for NaN. t + magic rounds t to the nearest integer n and leaves n plus
// the exponent bias in the low bits, ready to become the float 2^n.
template <class T>
QKV_INLINE Vec<T> exp2(Vec<T> t);

// Minimax in relative error on [-1/2, 1/2] with c0 = 1 (so that integers are
// exact): Remez, 2.6e-9.
template <>
QKV_INLINE Vec<float> exp2<float>(Vec<float> t) {
  const float magic = 12582912.f + 127.f;  // 1.5 * 2^23 + bias
  t = max<float>(splat(-127.f), t);
  const Vec<float> shifted = t + magic;
  const Vec<float> r = t - (shifted - magic);
  Vec<float> p = r * 1.55946781613e-4f + 1.34066439024e-3f;
  p = p * r + 9.61769297299e-3f;
  p = p * r + 5.55031055101e-2f;
  p = p * r + 2.40226527829e-1f;
  p = p * r + 6.93147214968e-1f;
  p = p * r + 1.f;
  return p * (Vec<float>)((IntVec<float>)shifted << 23);
}

// The same with degree 11: 1.8e-17.
template <>
QKV_INLINE Vec<double> exp2<double>(Vec<double> t) {
  const double magic = 6755399441055744. + 1023.;  // 1.5 * 2^52 + bias
  t = max<double>(splat(-1023.), t);
  const Vec<double> shifted = t + magic;
  const Vec<double> r = t - (shifted - magic);
  Vec<double> p = r * 4.078071929588336665e-10 + 7.0725704128144235096e-9;
  p = p * r + 1.0180647659234138888e-7;
  p = p * r + 1.3215442675329822143e-6;
  p = p * r + 1.5252727385193868197e-5;
  p = p * r + 1.540353044157213033e-4;
  p = p * r + 1.3333558153439964747e-3;
  p = p * r + 9.6181291076070023796e-3;
  p = p * r + 5.5504108664790394552e-2;
  p = p * r + 2.4022650695910098007e-1;
  p = p * r + 6.9314718055994569675e-1;
  p = p * r + 1.;
  return p * (Vec<double>)((IntVec<double>)shifted << 52);
}

}  // namespace qkv::QKV_ISA
