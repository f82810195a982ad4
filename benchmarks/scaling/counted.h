// An instruction set whose kernels compute nothing and count what the real ones would take: with it
// the simulator predicts the same on every machine.
#pragma once

namespace qkv::scaling {

// Makes "counted" known to set_isa(). Its kernels are those of float32 alone.
void add_counted();

// What the kernels of this thread have counted so far, in floating-point operations of products at
// full speed. Everything else is counted as the operations that take as long.
double counted();

}  // namespace qkv::scaling
