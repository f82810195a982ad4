// AVX2 and FMA: 16 registers of 32 bytes.
namespace qkv::QKV_ISA {

constexpr int kVectorBytes = 32;
// Rows of a tile that is one or two vectors wide. 6 x 2 = 12 accumulators, two
// vectors of B and one broadcast of A fill 15 of 16 registers.
constexpr int kMaxRows[2] = {12, 6};

}  // namespace qkv::QKV_ISA
