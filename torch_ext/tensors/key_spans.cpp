#include "tensors/key_spans.h"

#include "call/check.h"

namespace qkv {
namespace {

// The places that differ in memory: a dimension that broadcasts has one.
struct SpansCheck {
  const at::Tensor& spans;
  const int64_t seqlen_k;
  std::vector<int64_t> place;  // the index of a row, once it is known to be bad

  // Whether all spans are good, with the first `dim` indices behind `data`.
  bool holds(const int32_t* data, int64_t dim) {
    const int64_t size = spans.sizes()[dim], stride = spans.strides()[dim];
    if (dim + 1 == spans.dim()) return holds_row(data, size, stride);
    for (int64_t i = 0; i < (stride == 0 ? std::min<int64_t>(size, 1) : size); ++i) {
      if (holds(data + i * stride, dim + 1)) continue;
      place.insert(place.begin(), i);
      return false;
    }
    return true;
  }
  bool holds_row(const int32_t* row, int64_t size, int64_t stride) {
    for (int64_t n = 0; n < size; n += 2) {
      const int64_t begin = row[n * stride], end = row[(n + 1) * stride];
      if (0 <= begin && begin <= end && end <= seqlen_k) continue;
      place = {n / 2, begin, end};
      return false;
    }
    return true;
  }
};

}  // namespace

void check_spans(const Call& call, int64_t seqlen_k) {
  const at::Tensor& spans = call[arg::spans];
  if (spans.numel() == 0) return;
  SpansCheck check{spans, seqlen_k, {}};
  if (check.holds(spans.const_data_ptr<int32_t>(), 0)) return;
  const int64_t* const found = check.place.data() + check.place.size() - 3;
  const at::IntArrayRef row(check.place.data(), check.place.size() - 3);
  TORCH_CHECK_VALUE(false, call.title(), ": spans", row, " has the span ", found[0], " from ",
                    found[1], " to ", found[2], ", but 0 <= begin <= end",
                    seqlen_k == kMaxSpan ? "" : c10::str(" <= ", seqlen_k), " is expected");
}

}  // namespace qkv
