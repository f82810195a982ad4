#include "counted.h"

#include <algorithm>

#include "dispatch/kernel_table.h"

namespace qkv::scaling {
namespace {

// The costs, measured on one core of a Zen 3 (AVX2, float32, D = 64): what a pair of a row and a
// key takes beside its products (the softmax and its gradient), what a row takes for each element
// of the head dimension where it is packed, and for each element of a gradient that is completed.
constexpr double kPair = 40, kForwardRow = 40, kBackwardRow = 100, kFinished = 8;
// A call of a kernel: its scratch memory, and a tile that is not yet in the cache.
constexpr double kCall = 4e4;
constexpr int64_t kTileRows = 32;
// Blocks of keys, as those of AVX-512: whole steps of the micro-kernel.
constexpr int64_t kKeyStep = 14, kKeyBlock = 126;

thread_local double count = 0;

// The pairs of rows [row, end) and keys [key_begin, key_end) that tiles of kTileRows rows multiply.
double pairs_of(const Problem& p, int64_t row, int64_t end, int64_t begin, int64_t key_end_) {
  double pairs = 0;
  for (; row < end; row += kTileRows) {
    const int64_t last = std::min(end, row + kTileRows) - 1;
    const int64_t from = std::max(begin, key_begin(p, row / p.group()));
    const int64_t to = std::min(key_end_, key_end(p, last / p.group()));
    pairs += double(last + 1 - row) * double(std::max<int64_t>(0, to - from));
  }
  return pairs;
}

int64_t key_step(int64_t keys) {
  const int64_t blocks = std::max<int64_t>(1, (keys + kKeyBlock - 1) / kKeyBlock);
  return std::max<int64_t>(1, (keys + blocks * kKeyStep - 1) / (blocks * kKeyStep)) * kKeyStep;
}

// Neither kernel needs a workspace: where it is null, they were asked how much.
size_t forward(const Problem& p, const ForwardResult&, const ForwardItem& item, void* workspace) {
  if (!workspace) return 0;
  const double pairs = pairs_of(p, item.row_begin, item.row_end, item.key_begin, item.key_end);
  const auto dims = double(p.head_dim + p.head_dim_v);
  count += pairs * (2 * dims + kPair) + double(item.row_end - item.row_begin) * dims * kForwardRow +
           kCall;
  return 0;
}

// An element of a part counts as one of a gradient does.
void merge_parts(const Problem& p, const ForwardResult&, const RowParts& of) {
  count += double(of.splits) * double(p.head_dim_v) * kFinished;
}

size_t backward(const Problem& p, const BackwardArgs&, const BackwardItem& item, void* workspace) {
  const int64_t begin = std::max(item.row_begin, grad_row_begin(p, item.key_begin));
  const int64_t end = std::min(item.row_end, grad_row_end(p, item.key_end));
  if (!workspace || begin >= end) return 0;
  const auto dims = double(p.head_dim + p.head_dim_v);
  count += pairs_of(p, begin, end, item.key_begin, item.key_end) * (5 * dims + kPair) +
           double(end - begin) * dims / 2 * kBackwardRow + kCall;
  return 0;
}

void finish_rows(const Problem& p, const BackwardArgs&, const Finished& of) {
  count += double(of.end - of.begin) * double(p.head_dim) * kFinished;
}

void finish_keys(const Problem& p, const BackwardArgs&, const Finished& of) {
  count += double(of.end - of.begin) * double(p.head_dim + p.head_dim_v) * kFinished;
}

Implementation counted_isa() {
  Kernels k = {};
  k.tile_rows = kTileRows, k.lanes = 16, k.key_step = key_step;
  k.forward = forward, k.merge_parts = merge_parts, k.backward = backward;
  k.finish_rows = finish_rows, k.finish_keys = finish_keys;
  return {"counted", [] { return true; }, {k}};
}

}  // namespace

void add_counted() {
  static const Implementation isa = counted_isa();
  add_implementation(isa);
}

double counted() { return count; }

}  // namespace qkv::scaling
