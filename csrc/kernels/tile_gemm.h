// The one micro-kernel behind all products of attention (docs/kernels.md):
//
//   C[M x N] = beta * C + A[M x K] * B[K x N]
//
// A is read by broadcast, element by element, from any strides. B and C are
// rows of whole vectors. The sum over K starts from zero and is added to
// beta * C at the end, so a long reduction is summed in blocks, which is also
// what keeps its rounding error small.
namespace qkv::QKV_ISA {

enum class Beta { zero, one, lanes };  // lanes: one factor a column

// How A is laid out; the first two let the compiler fold an index into the
// load instruction.
enum Access { kRowMajor, kColumnMajor, kAnyStrides, kAccessCount };

template <class T>
struct MicroArgs {
  int64_t depth;  // K
  const T* a;
  int64_t a_row, a_col;
  const T* b;
  int64_t b_row;
  T* c;
  int64_t c_row;
  Beta beta;
  const T* lanes;  // [N], Beta::lanes only
};

template <class T, Access access, int M, int NV>
void micro_kernel(const MicroArgs<T>& args) {
  constexpr int W = kLanes<T>;
  const int64_t a_row = access == kColumnMajor ? 1 : args.a_row;
  const int64_t a_col = access == kRowMajor ? 1 : args.a_col;
  const T* a[M];
  QKV_UNROLL
  for (int i = 0; i < M; ++i) a[i] = args.a + i * a_row;
  const T* b = args.b;
  const int64_t b_row = args.b_row;

  Vec<T> sum[M][NV];
  QKV_UNROLL
  for (int i = 0; i < M; ++i)
    for (int v = 0; v < NV; ++v) sum[i][v] = Vec<T>{};

  for (int64_t k = 0; k < args.depth; ++k) {
    Vec<T> bv[NV];
    QKV_UNROLL
    for (int v = 0; v < NV; ++v) bv[v] = load(b + v * W);
    QKV_UNROLL
    for (int i = 0; i < M; ++i) {
      const Vec<T> av = splat(a[i][k * a_col]);
      QKV_UNROLL
      for (int v = 0; v < NV; ++v) sum[i][v] += av * bv[v];
    }
    b += b_row;
  }

  QKV_UNROLL
  for (int i = 0; i < M; ++i) {
    QKV_UNROLL
    for (int v = 0; v < NV; ++v) {
      T* c = args.c + i * args.c_row + v * W;
      if (args.beta == Beta::one) sum[i][v] += load(c);
      if (args.beta == Beta::lanes) sum[i][v] += load(args.lanes + v * W) * load(c);
      store(c, sum[i][v]);
    }
  }
}

template <class T>
using MicroKernel = void (*)(const MicroArgs<T>&);

template <class T, Access access, int NV, int... M>
constexpr auto micro_kernels(std::integer_sequence<int, M...>) {
  return std::array<MicroKernel<T>, sizeof...(M)>{micro_kernel<T, access, M + 1, NV>...};
}

// By rows - 1.
template <class T, Access access, int NV>
constexpr auto kMicroKernels =
    micro_kernels<T, access, NV>(std::make_integer_sequence<int, kMaxRows[NV - 1]>());

// All rows of C for one or two vectors of columns. Tiles of equal height, or
// one less, rather than full ones and a remainder.
template <class T, Access access, int NV>
void gemm_panel(int64_t rows, MicroArgs<T> args) {
  const int64_t tiles = (rows + kMaxRows[NV - 1] - 1) / kMaxRows[NV - 1];
  for (int64_t t = tiles; t > 0; --t) {
    const int64_t m = (rows + t - 1) / t;
    kMicroKernels<T, access, NV>[m - 1](args);
    args.a += m * args.a_row;
    args.c += m * args.c_row;
    rows -= m;
  }
}

template <class T, Access access>
void gemm_access(int64_t rows, int64_t columns, MicroArgs<T> args) {
  constexpr int W = kLanes<T>;
  while (columns > 0) {
    const int step = columns >= 2 * W ? 2 * W : W;
    step == W ? gemm_panel<T, access, 1>(rows, args) : gemm_panel<T, access, 2>(rows, args);
    args.b += step;
    args.c += step;
    args.lanes += step;
    columns -= step;
  }
}

// `columns` is a multiple of kLanes<T>.
template <class T>
void gemm(int64_t rows, int64_t columns, const MicroArgs<T>& args) {
  if (args.a_col == 1) return gemm_access<T, kRowMajor>(rows, columns, args);
  if (args.a_row == 1) return gemm_access<T, kColumnMajor>(rows, columns, args);
  gemm_access<T, kAnyStrides>(rows, columns, args);
}

}  // namespace qkv::QKV_ISA
