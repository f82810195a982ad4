#include "row_sums.h"

#include "common/half.h"
#include "common/row_sums.h"
#include "common/strides.h"
#include "dispatch/kernel_table.h"
#include "row_items.h"

namespace qkv {
namespace {

// Every call looks through its log-sum-exps here, so no item's Problem is copied for it.
template <class T>
bool sums_any_row(const Problem& p, const BackwardArgs& a) {
  for (int64_t b = 0; b < p.batch(); ++b) {
    const int64_t begin = p.spans ? p.spans[b].query_begin : 0;
    const int64_t rows = p.spans ? p.spans[b].seqlen_q : p.seqlen_q;
    for (int64_t h = 0; h < p.heads; ++h) {
      const T* const lse = plane<T>(p, a.lse, b, h) + begin * a.lse.strides.row;
      for (int64_t i = 0; i < rows; ++i)
        if (sums_row(a, lse[i * a.lse.strides.row])) return true;
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
  const Kernels& kernels = kernels_for(p, args);
  for_each_row_item(
      p,
      {kernels, [&](const Problem& item, int64_t) { return kernels.backward_workspace(item, 0); },
       [&](const Problem& item, const ForwardItem& rows, void* workspace) {
         kernels.row_sums(item, args, to, rows, workspace);
       }});
}

}  // namespace qkv
