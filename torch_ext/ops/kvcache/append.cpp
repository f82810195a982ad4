#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/kvcache/rows.h"
#include "tensors/overlap.h"
#include "threads/parallel.h"

namespace qkv::ops {
namespace {

constexpr int64_t kItemBytes = int64_t(64) << 10;
// Copying a byte takes as long as this many floating-point operations of attention, about.
constexpr double kFlopsOfByte = 5;

// -128 is not used, so that a row and its negative have the same scale.
constexpr float kLargestInt8 = 127;

// `count` elements of type E, `stride` bytes apart, anywhere in memory.
template <class E>
struct FloatRow {
  const char* data;
  int64_t stride, count;

  float operator[](int64_t i) const {
    E x;
    std::memcpy(&x, data + i * stride, sizeof x);
    return float(x);
  }
};

// The scale that makes the largest number of a row 127. NaN for a row that is not finite: every one
// of its numbers will be NaN.
template <class E>
float scale_of(const FloatRow<E>& row) {
  float largest = 0;
  bool is_finite = true;
  for (int64_t i = 0; i < row.count; ++i) {
    const float magnitude = std::abs(row[i]);
    largest = std::max(largest, magnitude);
    is_finite &= magnitude < INFINITY;
  }
  return is_finite ? largest / kLargestInt8 : NAN;
}

// to[i * stride] = row[i] / scale, to the nearest integer, ties to even, and from -127 to 127.
// Where the quotient is NaN, 0.
template <class E>
void quantize(const FloatRow<E>& row, float scale, int8_t* to, int64_t stride) {
  for (int64_t i = 0; i < row.count; ++i) {
    const float x = std::nearbyint(row[i] / scale);
    const float clamped = std::clamp(x, -kLargestInt8, kLargestInt8);
    to[i * stride] = x == x ? int8_t(clamped) : int8_t(0);
  }
}

// Whether values are the first numbers of the keys, in the caches and in what is appended, so that
// keys alone are written: the cache of latent attention.
bool values_begin_keys(const Call& call) {
  return begins_rows(call[arg::value], call[arg::key]) &&
         begins_rows(call[arg::new_value], call[arg::new_key]) &&
         (!is_int8(call) || call[arg::key_scale].is_same(call[arg::value_scale]));
}

void check_memory(const Call& call) {
  auto written = written_by(call);
  if (values_begin_keys(call)) {
    const auto of_values = [](Argument a) { return a == arg::value || a == arg::value_scale; };
    written.erase(std::remove_if(written.begin(), written.end(), of_values), written.end());
  }
  // What shares memory only until one of the two is written (torch._lazy_clone) parts here.
  for (const Argument argument : written) call[argument].mutable_data_ptr();
  for (const Argument argument : written)
    TORCH_CHECK(!overlaps_itself(call[argument]), call.title(), ": ", call.name_of(argument),
                ", with the strides ", call[argument].strides(),
                ", has elements that share memory, but with key, it is written to; clone() it");
  for (size_t i = 0; i < written.size(); ++i)
    for (size_t j = 0; j < i; ++j)
      TORCH_CHECK(!overlap(call[written[j]], call[written[i]]), call.title(), ": ",
                  call.name_of(written[j]), " and ", call.name_of(written[i]),
                  " share memory, but with key, both are written to");
  for (const auto& [name, tensor] : {std::pair("query", &call[arg::query]),
                                     {"key", &call[arg::new_key]},
                                     {"value", &call[arg::new_value]}})
    for (const Argument argument : written)
      TORCH_CHECK(!overlap(*tensor, call[argument]), call.title(), ": ", name,
                  " shares memory with ", call.name_of(argument),
                  ", which is written to; clone() it");
}

// One of the caches, [rows, Hkv, S_max, D] or [blocks, Hkv, block size, D], and what is appended to
// it, [B, Hkv, L_new, D]: copied or, for an int8 cache, quantized.
class Appending {
 public:
  // scale: of an int8 cache, else undefined.
  Appending(const at::Tensor& cache, const at::Tensor& added, const at::Tensor& scale,
            const CacheRows& rows)
      : cache_(cache), added_(added), scale_(scale), rows_(rows) {}

  Items items() const {
    if (columns_ == 0) return {};
    const double bytes = double(std::min(item_rows_, rows_.new_rows)) * columns_ * size_;
    return {int64_t(rows_.spans.size()) * heads_ * head_items_, bytes * kFlopsOfByte};
  }

  void run(int64_t item) const {
    const int64_t first = item % head_items_ * item_rows_;
    const int64_t head = item / head_items_ % heads_, b = item / head_items_ / heads_;
    const int64_t last = std::min(first + item_rows_, rows_.new_rows), length = rows_.length(b);
    for (int64_t row = first, n; row < last; row += n) {
      int64_t place = rows_.spans[b].key_item, at = length + row;
      n = last - row;
      if (const int32_t* const pages = rows_.spans[b].pages) {
        place = pages[at / block_size_];
        at %= block_size_;
        n = std::min(n, block_size_ - at);
      }
      char* const to = to_ + offset(to_strides_, place, head, at) * to_size_;
      const char* const from = from_ + offset(from_strides_, b, head, row) * size_;
      AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, added_.scalar_type(), "append",
                                      [&] {
                                        if (scale_.defined())
                                          quantize_rows<scalar_t>(to, from, place, head, at, n);
                                        else
                                          copy<scalar_t>(to, from, n);
                                      });
    }
  }

 private:
  int64_t offset(at::IntArrayRef strides, int64_t batch, int64_t head, int64_t row) const {
    return batch * strides[0] + head * strides[1] + row * strides[2];
  }

  template <class E>
  void quantize_rows(char* to, const char* from, int64_t place, int64_t head, int64_t at,
                     int64_t rows) const {
    for (int64_t i = 0; i < rows; ++i) {
      const FloatRow<E> row{from + i * from_strides_[2] * size_, from_strides_[3] * size_,
                            columns_};
      auto* const numbers = reinterpret_cast<int8_t*>(to) + i * to_strides_[2];
      quantize(row, scale_of_row(row, place, head, at + i), numbers, to_strides_[3]);
    }
  }

  // The given scale, or the row's own, which is written.
  template <class E>
  float scale_of_row(const FloatRow<E>& row, int64_t place, int64_t head, int64_t at) const {
    if (!is_per_token(scale_)) {
      const int64_t given = scale_.numel() > 1 ? head * scale_.strides()[0] : 0;
      return scale_.const_data_ptr<float>()[given];
    }
    const float scale = scale_of(row);
    scale_.mutable_data_ptr<float>()[offset(scale_.strides(), place, head, at)] = scale;
    return scale;
  }

  template <class E>
  void copy(char* to, const char* from, int64_t rows) const {
    const int64_t to_row = to_strides_[2], from_row = from_strides_[2];
    const int64_t to_step = to_strides_[3] * size_, from_step = from_strides_[3] * size_;
    const bool dense = columns_ == 1 || (to_strides_[3] == 1 && from_strides_[3] == 1);
    if (dense && to_row == columns_ && from_row == columns_) {
      std::memcpy(to, from, rows * columns_ * size_);
      return;
    }
    for (int64_t i = 0; i < rows; ++i, to += to_row * size_, from += from_row * size_) {
      if (dense)
        std::memcpy(to, from, columns_ * size_);
      else
        for (int64_t j = 0; j < columns_; ++j)  // memcpy: foreign memory may begin anywhere
          std::memcpy(to + j * to_step, from + j * from_step, sizeof(E));
    }
  }

  const at::Tensor &cache_, &added_, &scale_;
  const CacheRows& rows_;
  char* const to_ = static_cast<char*>(cache_.mutable_data_ptr());
  const char* const from_ = static_cast<const char*>(added_.const_data_ptr());
  const at::IntArrayRef to_strides_ = cache_.strides(), from_strides_ = added_.strides();
  // The bytes of an element of what is appended, and of the cache.
  const int64_t size_ = added_.element_size(), to_size_ = cache_.element_size();
  const int64_t heads_ = cache_.sizes()[1], block_size_ = cache_.sizes()[2];
  const int64_t columns_ = cache_.sizes()[3];
  const int64_t item_rows_ =
      std::max<int64_t>(1, kItemBytes / std::max<int64_t>(1, columns_* size_));
  const int64_t head_items_ = ceil_div(rows_.new_rows, item_rows_);
};

}  // namespace

void append(const Call& call, const CacheRows& rows, int num_threads) {
  check_memory(call);
  if (rows.new_rows == 0) return;
  const Appending both[] = {{call[arg::key], call[arg::new_key], call[arg::key_scale], rows},
                            {call[arg::value], call[arg::new_value], call[arg::value_scale], rows}};
  const int jobs = values_begin_keys(call) ? 1 : 2;
  double flops = 0;
  for (int job = 0; job < jobs; ++job) flops += both[job].items().count * both[job].items().flops;
  const Phase copy = {[&](int64_t job) { return both[job].items(); },
                      [&](const Item& item) { both[item.job].run(item.index); }};
  const int threads = usable_threads(num_threads, flops);
  parallel_phases({threads, threads}, jobs, {copy});
}

}  // namespace qkv::ops
