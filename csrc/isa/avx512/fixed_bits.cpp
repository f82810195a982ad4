// The kernels of kernels/fixed_bits.h.
#define QKV_FIXED_BITS
#include "isa/avx512/kernels.cpp"
