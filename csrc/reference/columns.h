// Sums over many rows, for each column.
#pragma once

#include <algorithm>
#include <cstdint>

namespace qkv::reference {

// add(begin, end, sums): sums[d - begin] += ... for begin <= d < end. store(d, sum).
// On the stack, a few columns at a time: this also runs in threads, where running
// out of memory could not be reported.
template <class Add, class Store>
void sum_columns(int64_t columns, Add add, Store store) {
  constexpr int64_t kColumns = 256;
  for (int64_t begin = 0; begin < columns; begin += kColumns) {
    const int64_t end = std::min(columns, begin + kColumns);
    double sums[kColumns] = {};
    add(begin, end, sums);
    for (int64_t d = begin; d < end; ++d) store(d, sums[d - begin]);
  }
}

}  // namespace qkv::reference
