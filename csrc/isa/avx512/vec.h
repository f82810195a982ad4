// AVX-512 F, BW, DQ, VL: 32 registers of 64 bytes.
namespace qkv::QKV_ISA {

constexpr int kVectorBytes = 64;
// Rows of a tile that is one or two vectors wide. 14 x 2 = 28 accumulators, two
// vectors of B and one broadcast of A fill 31 of 32 registers.
constexpr int kMaxRows[2] = {14, 14};

}  // namespace qkv::QKV_ISA
