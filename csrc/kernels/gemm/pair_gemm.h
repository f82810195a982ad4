// Products of pairs by vector instructions: the micro-kernel of tile_gemm.h.
namespace qkv::QKV_ISA {

// Whether A has to have neighbours along the depth next to each other, a_col = 1.
constexpr bool kTiles = false;

// Rows of A that are multiplied at once.
constexpr int kPairRows = kMaxRows[1];

struct PairUnit {
  explicit PairUnit(bool) {}
};

inline void gemm_pairs(int64_t rows, int64_t columns, const MicroArgs<Pair>& args) {
  gemm<Pair>(rows, columns, args);
}

}  // namespace qkv::QKV_ISA
