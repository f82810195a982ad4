// The kernels of kernels/fixed_bits.h.
#define QKV_FIXED_BITS
#include "isa/avx2/kernels.cpp"
