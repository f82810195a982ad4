// Every kernel header, each after those it uses. Included once by each
// isa/<name>/kernels.cpp, inside its target region and after its vec.h. One that
// multiplies pairs of bf16 defines QKV_PAIR_GEMM, the header that does.
// clang-format off
#include "kernels/vec.h"
#include "kernels/halves.h"
#include "kernels/exp.h"
#include "kernels/transpose.h"
#ifdef QKV_PAIR_GEMM
#include "kernels/pairs.h"
#endif
#include "kernels/tile_gemm.h"
#ifdef QKV_PAIR_GEMM
#include QKV_PAIR_GEMM
#endif
#include "kernels/rows.h"
#include "kernels/tile.h"
#include "kernels/contract.h"
#include "kernels/key_rows.h"
#include "kernels/user_tile.h"
#include "kernels/mask.h"
#include "kernels/softcap.h"
#include "kernels/alibi.h"
#include "kernels/dropout.h"
#include "kernels/score.h"
#include "repair/counts.h"
#ifdef QKV_PAIR_GEMM
#include "repair/pair_counts.h"
#endif
#include "repair/marks.h"
#include "repair/nonfinite_keys.h"
#include "repair/nonfinite_rows.h"
#include "kernels/softmax.h"
#include "kernels/grad_mask.h"
#include "kernels/products.h"
#include "kernels/few_rows.h"
#include "kernels/few_row_products.h"
#include "kernels/grad_products.h"
#ifdef QKV_PAIR_GEMM
#include "kernels/pair_operands.h"
#include "repair/nonfinite_pairs.h"
#include "kernels/pair_products.h"
#include "kernels/pair_grad_products.h"
#endif
#include "kernels/forward.h"
#include "kernels/grad_rows.h"
#include "kernels/grad_softmax.h"
#include "kernels/backward.h"
#include "kernels/weights_dot.h"
#include "kernels/hard.h"
#include "kernels/entry.h"
#ifdef QKV_PAIR_GEMM
#include "kernels/pair_entry.h"
#endif
// clang-format on
