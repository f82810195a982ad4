// Every kernel header, each after those it uses. Included once by each
// isa/<name>/kernels.cpp, inside its target region and after its vec.h. One that
// multiplies pairs of bf16 defines QKV_PAIR_GEMM, the header that does.
// clang-format off
#include "kernels/simd/vec.h"
#include "kernels/simd/halves.h"
#include "kernels/simd/exp.h"
#include "kernels/simd/transpose.h"
#ifdef QKV_PAIR_GEMM
#include "kernels/gemm/pairs.h"
#endif
#include "kernels/gemm/tile_gemm.h"
#ifdef QKV_PAIR_GEMM
#include QKV_PAIR_GEMM
#endif
#include "kernels/operands/rows.h"
#include "kernels/operands/tile.h"
#include "kernels/contract.h"
#include "kernels/operands/key_rows.h"
#include "kernels/operands/user_tile.h"
#include "kernels/operands/operand.h"
#include "kernels/operands/key_operand.h"
#include "kernels/operands/row_operand.h"
#include "kernels/operands/tile_operand.h"
#include "kernels/operands/output_sum.h"
#ifdef QKV_PAIR_GEMM
#include "kernels/operands/pair_operands.h"
#include "kernels/operands/pair_tiles.h"
#endif
#include "kernels/products/products.h"
#include "kernels/products/few_rows.h"
#include "kernels/score/mask.h"
#include "kernels/score/softcap.h"
#include "kernels/score/alibi.h"
#include "kernels/score/dropout.h"
#include "kernels/score/score.h"
#include "repair/counts.h"
#ifdef QKV_PAIR_GEMM
#include "repair/pair_counts.h"
#endif
#include "repair/marks.h"
#include "repair/nonfinite_keys.h"
#include "repair/nonfinite_rows.h"
#include "kernels/score/softmax.h"
#include "kernels/score/grad_mask.h"
#include "kernels/passes/forward_tiles.h"
#include "kernels/passes/forward_few_rows.h"
#include "kernels/passes/forward_state.h"
#include "kernels/passes/forward.h"
#include "kernels/passes/backward_operands.h"
#include "kernels/passes/grad_rows.h"
#include "kernels/score/grad_softmax.h"
#include "kernels/passes/grad_tile.h"
#include "kernels/passes/finish_grad.h"
#include "kernels/passes/backward.h"
#include "kernels/passes/weights_dot.h"
#include "kernels/passes/hard.h"
#include "kernels/entry.h"
#ifdef QKV_PAIR_GEMM
#include "kernels/pair_entry.h"
#endif
// clang-format on
