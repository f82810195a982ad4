#include "table_sums.h"

#include <algorithm>
#include <cstring>

#include "threads/parallel.h"

namespace qkv {
namespace {

// There are at least so many sums, if rows and memory permit, and so many threads find work.
constexpr int64_t kWantedSums = 32;
// The most bytes that the sums of a whole batch take beside its gradients, unless one is larger, or
// there has to be one for each plane: of tables with rows of their own for batch items, and where
// planes take turns at a mask's gradient (Sharing).
constexpr int64_t kMostBytes = int64_t(32) << 20;

int64_t table_elements(const Problem& p, const BackwardArgs& args) {
  return args.grad_tables && p.function ? p.function->program->table_size() : 0;
}

}  // namespace

TableSums::TableSums(const Problem& p, const BackwardArgs& args, const Stretch& stretch,
                     int64_t parts, int64_t most_bands, bool may_share)
    : p_(p),
      args_(args),
      stretch_(stretch),
      elements_(table_elements(p, args)),
      element_(elements_ && p.function->program->sums_in_double() ? sizeof(double)
                                                                  : size_of(compute_type(p.dtype))),
      planes_(std::max<int64_t>(1, stretch.count * p.kv_heads)),
      parts_(parts) {
  if (!are_wanted()) return;
  bands_ = std::clamp<int64_t>(ceil_div(kWantedSums, planes_ * parts_), 1, most_bands);
  const int64_t most = kMostBytes * stretch.count / std::max<int64_t>(1, p.batch());
  const auto is_too_large = [&] { return sums() * elements_ * element_ > most; };
  if (is_too_large()) bands_ = 1;
  // Divisors, so that as many planes share each sum.
  if (may_share && p.function->rows == 1)
    for (int64_t n = planes_; n > 1 && is_too_large(); --n)
      if (stretch.count * p.kv_heads % (n - 1) == 0) planes_ = n - 1;
  memory_.resize(size_t(sums() * elements_ * element_));
}

void* TableSums::sum(int64_t plane, int64_t part, int64_t band) const {
  if (!are_wanted()) return nullptr;
  const int64_t number = (plane % planes_ * parts_ + part) * bands_ + band;
  return memory_.data() + number * elements_ * element_;
}

template <class T, class Sum>
void TableSums::add_as() const {
  const ScoreFunction& f = *p_.function;
  for (int64_t n = 0; n < sums(); ++n) {
    const Plane plane = stretch_.plane(p_, n / (parts_ * bands_));
    const Sum* const from = reinterpret_cast<const Sum*>(memory_.data()) + n * elements_;
    T* const to =
        static_cast<T*>(args_.grad_tables) + (f.items ? plane.batch / f.items : 0) * f.table_step;
    for (int64_t i = 0; i < elements_; ++i) to[i] = T(to[i] + from[i]);
  }
}

void TableSums::add() const {
  if (!are_wanted()) return;
  if (compute_type(p_.dtype) == DType::f64) return add_as<double, double>();
  element_ == sizeof(double) ? add_as<float, double>() : add_as<float, float>();
}

void clear_grad_tables(const Problem& p, const BackwardArgs& args) {
  const int64_t bytes = table_elements(p, args) * size_of(compute_type(p.dtype));
  if (bytes == 0) return;
  const int64_t step = p.function->table_step * size_of(compute_type(p.dtype));
  for (int64_t row = 0; row < p.function->rows; ++row)
    std::memset(static_cast<char*>(args.grad_tables) + row * step, 0, size_t(bytes));
}

}  // namespace qkv
