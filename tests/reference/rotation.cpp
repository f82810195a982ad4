// Rotations.
#include <cmath>
#include <vector>

#include "reference/element.h"
#include "reference/reference.h"

namespace qkv::reference {
namespace {

// One row of a tensor; false if the tensor is not there.
template <class Data>
struct Row {
  Type type;
  Data* data;
  int64_t first, step;

  explicit operator bool() const { return data != nullptr; }
  double operator()(int64_t i) const { return data ? read(type, data, first + i * step) : 0; }
  void set(int64_t i, double x) const {
    if (data) write(type, data, first + i * step, x);
  }
  void add(int64_t i, double x) const { set(i, (*this)(i) + x); }
};

template <class Tensor>
using RowOf = Row<std::remove_pointer_t<decltype(Tensor::data)>>;

// The row of one position of one head of one batch item.
class Place {
 public:
  Place(const Rotation& r, int tensor, int64_t b, int64_t h, int64_t l)
      : r(r), tensor(r.tensors[tensor]), b_(b), h_(h), l_(l) {
    const auto x = of(this->tensor.input);
    double sum = 0;
    for (int64_t d = 0; d < r.head_dim; ++d) sum += x(d) * x(d);
    norm = this->tensor.weight.data ? 1 / std::sqrt(sum / double(r.head_dim) + r.eps) : 1;
  }

  template <class Tensor>
  RowOf<Tensor> of(const Tensor& t) const {
    return row(t, r.dtype, h_, l_);
  }
  template <class Tensor>
  RowOf<Tensor> table(const Tensor& t) const {
    return row(t, t.dtype, 0, l_ + (r.offsets ? r.offsets[b_] : 0));
  }
  template <class Tensor>
  RowOf<Tensor> of_weight(const Tensor& t) const {
    return row(t, t.dtype, 0, 0);
  }
  double weight(int64_t d) const {
    const auto row = of_weight(tensor.weight);
    return row ? row(d) : 1;
  }
  double normal(int64_t d) const { return of(tensor.input)(d) * norm * weight(d); }
  // The two numbers of a pair.
  std::pair<int64_t, int64_t> pair(int64_t i) const {
    return r.is_interleaved ? std::pair(2 * i, 2 * i + 1) : std::pair(i, i + r.rotary_pairs);
  }

  const Rotation& r;
  const RotatedTensor& tensor;
  double norm;

 private:
  template <class Tensor>
  RowOf<Tensor> row(const Tensor& t, DType dtype, int64_t h, int64_t position) const {
    const Strides& s = t.strides;
    const int64_t first = batch_offset(r, s, b_) + h * s.head + position * s.row;
    return {type_of(dtype), t.data, first, s.col};
  }

  int64_t b_, h_, l_;
};

template <class F>
void for_each_row(const Rotation& r, const F& f) {
  for (int t = 0; t < 2; ++t)
    for (int64_t b = 0; b < r.batch(); ++b)
      for (int64_t h = 0; h < r.tensors[t].heads; ++h)
        for (int64_t l = 0; l < r.seqlen; ++l) f(t, Place(r, t, b, h, l));
}

}  // namespace

void rotation_forward(const Rotation& r) {
  for_each_row(r, [&](int, const Place& at) {
    const auto y = at.of(at.tensor.output);
    const auto cos = at.table(r.cos), sin = at.table(r.sin);
    for (int64_t d = 2 * r.rotary_pairs; d < r.head_dim; ++d) y.set(d, at.normal(d));
    for (int64_t i = 0; i < r.rotary_pairs; ++i) {
      const auto [a, b] = at.pair(i);
      y.set(a, at.normal(a) * cos(i) - at.normal(b) * sin(i));
      y.set(b, at.normal(b) * cos(i) + at.normal(a) * sin(i));
    }
  });
}

void rotation_backward(const Rotation& r, const RotationGradients& gradients) {
  for_each_row(r, [&](int t, const Place& at) {
    const auto grad = at.of(gradients.grad_output[t]), x = at.of(at.tensor.input);
    const auto cos = at.table(r.cos), sin = at.table(r.sin);
    const auto grad_weight = at.of_weight(gradients.grad_weight[t]);
    std::vector<double> g(r.head_dim);  // of the row that is rotated
    for (int64_t d = 0; d < r.head_dim; ++d) g[d] = grad(d);
    for (int64_t i = 0; i < r.rotary_pairs; ++i) {
      const auto [a, b] = at.pair(i);
      g[a] = grad(a) * cos(i) + grad(b) * sin(i);
      g[b] = grad(b) * cos(i) - grad(a) * sin(i);
      at.table(gradients.grad_cos).add(i, grad(a) * at.normal(a) + grad(b) * at.normal(b));
      at.table(gradients.grad_sin).add(i, grad(b) * at.normal(a) - grad(a) * at.normal(b));
    }
    double dot = 0;
    for (int64_t d = 0; d < r.head_dim; ++d) {
      grad_weight.add(d, g[d] * x(d) * at.norm);
      dot += g[d] * at.weight(d) * x(d) * at.norm / double(r.head_dim);
    }
    const bool has_norm = at.tensor.weight.data != nullptr;
    for (int64_t d = 0; d < r.head_dim; ++d)
      at.of(at.tensor.output)
          .set(d, at.norm * (g[d] * at.weight(d) - (has_norm ? x(d) * at.norm * dot : 0)));
  });
}

}  // namespace qkv::reference
