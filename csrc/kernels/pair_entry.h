// The table of an instruction set that multiplies pairs.
namespace qkv::QKV_ISA {

inline void pair_gemm_entry(int64_t rows, int64_t columns, int64_t depth, const Pair* a,
                            int64_t a_row, int64_t a_col, const Pair* b, int64_t b_row, float* c,
                            int64_t c_row, int beta, const float* lanes, float alpha) {
  const PairUnit unit(true);
  gemm<Pair>(rows, columns,
             {depth, a, a_row, a_col, b, b_row, c, c_row, static_cast<Beta>(beta), lanes, alpha});
}

constexpr Kernels pair_kernels() {
  Kernels kernels = kernels_of<BFloat16>();
  kernels.pairs = {kTiles, pair_gemm_entry, pair_rows, pair_rows, narrow_rows};
  return kernels;
}

}  // namespace qkv::QKV_ISA
