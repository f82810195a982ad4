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
  const double flops = 2 * double(p.batch * p.columns) * double(p.depth) * double(p.rows);
  Threads threads{usable_threads(p.num_threads, flops), 1};
  // At least two items a thread, which need not be equally fast: as many columns as others have,
  // but for a unit, which is a cache line of half precision.
  constexpr int64_t kUnit = 2 * kProductUnit;
  const int64_t units = ceil_div(p.columns, kUnit);
  const int64_t wanted = ceil_div(2 * threads.team, std::max<int64_t>(1, p.batch));
  const int64_t blocks = std::max(std::min(units, wanted), ceil_div(p.columns, kProductColumns));
  const int64_t items = p.batch * blocks;
  if (items == 0) return;
  const auto first_of = [&](int64_t block) {
    return std::min(p.columns, block * units / blocks * kUnit);
  };
  const auto item = [&](int64_t index) {
    const int64_t block = index % blocks;
    return RowProductItem{index / blocks, first_of(block), first_of(block + 1)};
  };
  threads.working = int(std::clamp<int64_t>(items, 1, threads.team));
  const size_t bytes = kernels.row_product(p, item(0), nullptr);
  const Buffer buffer(bytes * size_t(threads.working));
  char* const memory = static_cast<char*>(buffer.data());
  parallel_phases(threads, 1,
                  {{[&](int64_t) { return Items{items, flops / double(items)}; },
                    [&](const Item& i) {
                      kernels.row_product(p, item(i.index), memory + size_t(i.thread) * bytes);
                    }}});
}

}  // namespace qkv
