// Products of few rows with matrices (row_product.h): blocks of columns.
#include "row_product.h"

#include <algorithm>

#include "common/workspace.h"
#include "dispatch/kernel_table.h"
#include "threads/parallel.h"

namespace qkv {

bool multiplies_rows(const RowProduct& p) {
  const bool along_columns = p.matrix.strides.row == 1 && p.columns % kProductUnit == 0;
  return p.rows <= kMostProductRows && (along_depth(p) || along_columns) &&
         active_kernels(p.dtype).row_product;
}

void row_product(const RowProduct& p) {
  const Kernels& kernels = active_kernels(p.dtype);
  const double flops = 2 * double(p.depth) * double(p.rows);  // of a column
  Threads threads{usable_threads(p.num_threads, flops * double(p.batch * p.columns)), 1};
  // Several items a thread, which need not be equally fast, and of whole cache lines.
  const int64_t share = p.batch * p.columns / (2 * threads.team), line = int64_t(kCacheLine);
  const int64_t step = std::clamp(ceil_div(share, line) * line, line, kProductColumns);
  const int64_t blocks = ceil_div(p.columns, step), items = p.batch * blocks;
  if (items == 0) return;
  const auto item = [&](int64_t index) {
    const int64_t begin = index % blocks * step;
    return RowProductItem{index / blocks, begin, std::min(p.columns, begin + step)};
  };
  threads.working = int(std::clamp<int64_t>(items, 1, threads.team));
  const size_t bytes = kernels.row_product(p, item(0), nullptr);
  const Buffer buffer(bytes * size_t(threads.working));
  char* const memory = static_cast<char*>(buffer.data());
  parallel_phases(threads, 1,
                  {{[&](int64_t) { return Items{items, flops * double(step)}; },
                    [&](const Item& i) {
                      const RowProductItem next = item(std::min(i.index + 1, items - 1));
                      RowProductItem own = item(i.index);
                      own.next = &next;
                      kernels.row_product(p, own, memory + size_t(i.thread) * bytes);
                    }}});
}

}  // namespace qkv
