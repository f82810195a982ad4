// Every kernel header, each after those it uses. Included once by each
// isa/<name>/kernels.cpp, inside its target region and after its vec.h.
// clang-format off
#include "kernels/vec.h"
#include "kernels/exp.h"
#include "kernels/transpose.h"
#include "kernels/tile_gemm.h"
#include "kernels/rows.h"
#include "kernels/tile.h"
#include "kernels/mask.h"
#include "kernels/softcap.h"
#include "kernels/alibi.h"
#include "kernels/dropout.h"
#include "kernels/score.h"
#include "kernels/softmax.h"
#include "kernels/tile_sums.h"
#include "kernels/forward.h"
#include "kernels/grad_rows.h"
#include "kernels/grad_softmax.h"
#include "kernels/backward.h"
#include "kernels/weights_dot.h"
#include "kernels/hard.h"
#include "kernels/entry.h"
// clang-format on
