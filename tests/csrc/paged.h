// The keys and values of a Workload, in pages.
#pragma once

#include <sys/mman.h>

#include <cstring>
#include <deque>
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

// The keys and values of Workloads in pages, which are in any order, with others between them that
// may not be read. With `repeat` some pages of a Workload serve several times; its keys and values
// are made to repeat accordingly. The Workloads have no batch, differ only in L, S and seed, and
// must outlive this.
class Paged {
 public:
  Paged(const std::vector<Workload*>& all, int64_t size, uint64_t seed, bool repeat = true)
      : all_(all), random_(seed), size_(size) {
    int64_t pages = 0;
    for (const Workload* w : all_) pages += count(*w);
    const int64_t room = 2 * pages + 1;
    std::vector<int64_t> order(room);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    auto next = order.begin();
    for (size_t n = 0; n < all_.size(); ++n) {
      Workload& w = *all_[n];
      Tensor& table =
          tables_.emplace_back(Type::int32, Sizes{1, 1, count(w)}, Sizes{0, 0, 1}, w.c.at_front);
      table.fill([&] { return double(*next++); });
      for (int64_t page = 1; page < w.c.S / size && repeat; ++page)
        if (draw(random_, 0, 3) == 0) share(n, draw(random_, 0, page - 1), page);
      table.make_read_only();
    }
    const Case& c = all_[0]->c;
    key_ = fill(&Workload::key, c.kv_heads / c.key_head_repeat, c.D, room);
    value_ = fill(&Workload::value, c.kv_heads / c.value_head_repeat, c.Dv, room);
  }
  Paged(Workload& w, int64_t size, uint64_t seed, bool repeat = true)
      : Paged(std::vector<Workload*>{&w}, size, seed, repeat) {}

  // The problem of the only Workload.
  Problem problem() const {
    Problem p = all_[0]->problem();
    put_in_pages(p);
    p.pages.table = table(0);
    return p;
  }
  // Gives a problem these pages instead of its keys and values. The table is left to the caller.
  void put_in_pages(Problem& p) const {
    const int64_t key_repeat = p.key.strides.head_repeat;
    const int64_t value_repeat = p.value.strides.head_repeat;
    p.key = key_->input(), p.key.strides.head_repeat = key_repeat;
    p.value = value_->input(), p.value.strides.head_repeat = value_repeat;
    p.pages = {nullptr, size_, key_->page_stride(), value_->page_stride()};
  }
  const int32_t* table(size_t n) const { return static_cast<const int32_t*>(tables_[n].data()); }

 private:
  int64_t count(const Workload& w) const { return (w.c.S + size_ - 1) / size_; }

  // Page b of Workload n, which must be full, becomes another name for page a.
  void share(size_t n, int64_t a, int64_t b) {
    Workload& w = *all_[n];
    tables_[n].set({0, 0, b}, tables_[n].get({0, 0, a}));
    const auto copy = [&](Tensor& t, int64_t heads, int64_t cols) {
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t j = 0; j < size_; ++j)
          for (int64_t d = 0; d < cols; ++d)
            t.set({h, b * size_ + j, d}, t.get({h, a * size_ + j, d}));
    };
    copy(w.key, w.c.kv_heads / w.c.key_head_repeat, w.c.D);
    copy(w.value, w.c.kv_heads / w.c.value_head_repeat, w.c.Dv);
  }

  std::unique_ptr<PagedRows> fill(Tensor Workload::* from, int64_t heads, int64_t cols,
                                  int64_t room) {
    const Type type = type_of(all_[0]->c.dtype);
    auto rows = std::make_unique<PagedRows>(type, heads, size_, cols, room, random_);
    for (size_t n = 0; n < all_.size(); ++n)
      for (int64_t page = 0; page < tables_[n].numel(); ++page)
        rows->write(int64_t(tables_[n].get({0, 0, page})), all_[n]->*from,
                    {heads, all_[n]->c.S, cols}, page * size_, size_);
    return rows;
  }

  std::vector<Workload*> all_;
  Random random_;
  int64_t size_;
  std::deque<Tensor> tables_;
  std::unique_ptr<PagedRows> key_, value_;
};

}  // namespace qkv::test
