#include "row_sums.h"

#include "common/half.h"
#include "common/row_sums.h"
#include "common/strides.h"
#include "dispatch/kernel_table.h"
#include "row_items.h"
#include "stretch.h"

namespace qkv {
namespace {

template <class T>
bool sums_any_row(const Problem& call, const BackwardArgs& a) {
  for (int64_t b = 0; b < call.batch(); ++b) {
    const ItemProblem item(call, b);
    const Problem& p = *item;
    for (int64_t h = 0; h < p.heads; ++h) {
      const T* const lse = query_plane<T>(p, a.lse, b, h);
      for (int64_t i = 0; i < p.seqlen_q; ++i)
        if (sums_row(p, a, lse[i * a.lse.strides.row])) return true;
    }
  }
  return false;
}

}  // namespace

RowSums::RowSums(const Problem& p, const BackwardArgs& args) : args_(args) {
  const DType type = compute_type(p.dtype);
  if (!(type == DType::f64 ? sums_any_row<double>(p, args) : sums_any_row<float>(p, args))) return;
  Input& sums = args_.row_sums;
  memory_.emplace(size_t(lay_out_row_sums(p, sums.strides) * size_of(type)));
  sums.data = memory_->data();
  const Output to{memory_->data(), sums.strides};
  const Kernels& kernels = args.direction ? jvp_kernels(p.dtype) : kernels_for(p);
  for_each_row_item(
      p,
      {kernels, [&](const Problem& item, int64_t) { return kernels.backward_workspace(item, 0); },
       [&](const Problem& item, const ForwardItem& rows, void* workspace) {
         kernels.row_sums(item, args, to, rows, workspace);
       }});
}

}  // namespace qkv
