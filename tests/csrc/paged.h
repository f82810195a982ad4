// The keys and values of a Workload, in pages.
#pragma once

#include <sys/mman.h>

#include <cstring>
#include <numeric>
#include <vector>

#include "workload.h"

namespace qkv::test {

// Pages [Hkv, size, cols] in any order in memory in which nothing else may be touched: each lies
// against one end of whole pages of the operating system.
class PagedRows {
 public:
  PagedRows(Type type, int64_t heads, int64_t size, int64_t cols, int64_t pages, Random& random)
      : type_(type), head_first_(draw(random, 0, 1)), at_front_(draw(random, 0, 1)) {
    const int64_t gap = draw(random, 0, 2) ? 0 : draw(random, 1, 5);  // after each row
    strides_.col = 1;
    strides_.row = (cols + gap) * (head_first_ ? 1 : heads);
    strides_.head = (cols + gap) * (head_first_ ? size : 1);
    bytes_ = size_t(heads * size * (cols + gap) - gap) * element();
    inner_ = (bytes_ + os_page() - 1) / os_page() * os_page();
    each_ = inner_ + os_page() * size_t(draw(random, 1, 2));
    all_ = each_ * size_t(pages) + os_page();
    void* at = mmap(nullptr, all_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<uint8_t*>(at);
  }
  ~PagedRows() { munmap(memory_, all_); }
  PagedRows(const PagedRows&) = delete;

  // Fills a page with rows [first, first + size) of `from` [Hkv, S, cols], and with NaN after the
  // last of them.
  void write(int64_t page, const Tensor& from, const Sizes& sizes, int64_t first, int64_t size) {
    uint8_t* begin = memory_ + os_page() + each_ * size_t(page);
    protect(begin, inner_, PROT_READ | PROT_WRITE);
    uint8_t* data = begin + offset();
    for (int64_t h = 0; h < sizes[0]; ++h)
      for (int64_t j = 0; j < size; ++j)
        for (int64_t d = 0; d < sizes[2]; ++d) {
          const double x = first + j < sizes[1] ? from.get({h, first + j, d}) : kNaN;
          reference::write(type_, data, h * strides_.head + j * strides_.row + d, x);
        }
    protect(begin, inner_, PROT_READ);
  }

  int64_t page_stride() const { return int64_t(each_ / element()); }
  Input input() const { return {memory_ + os_page() + offset(), strides_}; }

 private:
  size_t element() const { return size_t(reference::size_of(type_)); }
  size_t offset() const { return at_front_ ? 0 : inner_ - bytes_; }

  Type type_;
  bool head_first_, at_front_;
  Strides strides_;
  size_t bytes_, inner_, each_, all_;
  uint8_t* memory_;
};

// The keys and values of a Workload in pages, which are in any order, with others between them that
// may not be read. With `repeat` some pages serve several times; the Workload's keys and values are
// made to repeat accordingly. The Workload has one batch item, and must outlive this.
class Paged {
 public:
  Paged(Workload& w, int64_t size, uint64_t seed, bool repeat = true)
      : w_(w), random_(seed), size_(size) {
    const Case& c = w.c;
    const int64_t count = (c.S + size - 1) / size, room = 2 * count + 1;
    std::vector<int64_t> order(room);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    table_ = Tensor(Type::int32, {1, 1, count}, {0, 0, 1}, c.at_front);
    for (int64_t n = 0; n < count; ++n) table_.set({0, 0, n}, double(order[n]));
    for (int64_t n = 1; n < c.S / size && repeat; ++n)
      if (draw(random_, 0, 3) == 0) share(draw(random_, 0, n - 1), n);
    key_ = fill(w.key, c.kv_heads / c.key_head_repeat, c.D, room);
    value_ = fill(w.value, c.kv_heads / c.value_head_repeat, c.Dv, room);
    table_.make_read_only();
  }

  Problem problem() const {
    Problem p = w_.problem();
    const int64_t key_repeat = p.key.strides.head_repeat;
    const int64_t value_repeat = p.value.strides.head_repeat;
    p.key = key_->input(), p.key.strides.head_repeat = key_repeat;
    p.value = value_->input(), p.value.strides.head_repeat = value_repeat;
    p.pages = {static_cast<const int32_t*>(table_.data()), size_, key_->page_stride(),
               value_->page_stride()};
    return p;
  }

 private:
  // Page n, which must be full, becomes another name for page m.
  void share(int64_t m, int64_t n) {
    table_.set({0, 0, n}, table_.get({0, 0, m}));
    const auto copy = [&](Tensor& t, int64_t heads, int64_t cols) {
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t j = 0; j < size_; ++j)
          for (int64_t d = 0; d < cols; ++d)
            t.set({h, n * size_ + j, d}, t.get({h, m * size_ + j, d}));
    };
    copy(w_.key, w_.c.kv_heads / w_.c.key_head_repeat, w_.c.D);
    copy(w_.value, w_.c.kv_heads / w_.c.value_head_repeat, w_.c.Dv);
  }

  std::unique_ptr<PagedRows> fill(const Tensor& from, int64_t heads, int64_t cols, int64_t room) {
    auto rows = std::make_unique<PagedRows>(type_of(w_.c.dtype), heads, size_, cols, room, random_);
    for (int64_t n = 0; n < table_.numel(); ++n)
      rows->write(int64_t(table_.get({0, 0, n})), from, {heads, w_.c.S, cols}, n * size_, size_);
    return rows;
  }

  Workload& w_;
  Random random_;
  int64_t size_;
  Tensor table_;
  std::unique_ptr<PagedRows> key_, value_;
};

}  // namespace qkv::test
