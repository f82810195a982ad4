// All of operands/. Whoever uses an operand, rows or tiles includes this file, or one that does,
// and none of those below: where an instruction set multiplies pairs of bf16, each operand has a
// second body for bf16, which the compiler must see before the operand is used.
#pragma once

#include "kernels/operands/ask_rows.h"
#include "kernels/operands/key_operand.h"
#include "kernels/operands/output_sum.h"
#include "kernels/operands/row_operand.h"
#include "kernels/operands/tile_operand.h"
#include "kernels/operands/user_tile.h"
#ifdef QKV_PAIRS
#include "kernels/operands/pair_operands.h"
#include "kernels/operands/pair_tiles.h"
#endif
