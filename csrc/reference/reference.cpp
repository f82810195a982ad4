#include "reference/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "strides.h"

namespace qkv::reference {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// A [rows, cols] plane of one batch item and head, read as double.
struct Plane {
  const void* data;
  DType dtype;
  int64_t row, col;

  double operator()(int64_t r, int64_t c = 0) const {
    const int64_t at = r * row + c * col;
    return dtype == DType::f32 ? static_cast<const float*>(data)[at]
                               : static_cast<const double*>(data)[at];
  }
};

size_t element_size(DType dtype) { return dtype == DType::f32 ? sizeof(float) : sizeof(double); }

Plane plane_of(const Problem& p, const void* data, const Strides& s, DType dtype, int64_t b,
               int64_t h) {
  const char* base = static_cast<const char*>(data);
  return {base + plane_offset(p, s, b, h) * int64_t(element_size(dtype)), dtype, s.row, s.col};
}

Plane plane_of(const Problem& p, const Input& t, int64_t b, int64_t h) {
  return plane_of(p, t.data, t.strides, p.dtype, b, h);
}

void store(const Problem& p, const Output& t, int64_t b, int64_t h, int64_t r, int64_t c,
           double x) {
  const int64_t at = plane_offset(p, t.strides, b, h) + r * t.strides.row + c * t.strides.col;
  if (p.dtype == DType::f32) {
    static_cast<float*>(t.data)[at] = float(x);
  } else {
    static_cast<double*>(t.data)[at] = x;
  }
}

// What the mask adds to a score: -inf where query i may not see key j.
double bias(const Problem& p, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (p.is_causal && j > i) return -kInf;
  const Strides& s = p.mask.strides;
  switch (p.mask_type) {
    case MaskType::none:
      return 0;
    case MaskType::boolean: {
      const int64_t at = plane_offset(p, s, b, h) + i * s.row + j * s.col;
      return static_cast<const uint8_t*>(p.mask.data)[at] ? 0 : -kInf;
    }
    case MaskType::f32:
      return plane_of(p, p.mask.data, s, DType::f32, b, h)(i, j);
    case MaskType::f64:
      return plane_of(p, p.mask.data, s, DType::f64, b, h)(i, j);
  }
  return 0;
}

// scale * <query_i, key_j> + bias; -inf, whatever the dot product, if masked.
double score(const Problem& p, int64_t b, int64_t h, int64_t i, int64_t j) {
  const double add = bias(p, b, h, i, j);
  if (add == -kInf) return -kInf;
  const Plane query = plane_of(p, p.query, b, h);
  const Plane key = plane_of(p, p.key, b, h / p.group());
  double dot = 0;
  for (int64_t d = 0; d < p.head_dim; ++d) dot += query(i, d) * key(j, d);
  return dot * p.scale + add;
}

// One query row of the backward pass: what turns a score into its gradient.
struct Row {
  double lse;
  double delta;  // <grad_output, output> - grad_lse
};

Row row_of(const Problem& p, const BackwardArgs& a, int64_t b, int64_t h, int64_t i) {
  Row row{plane_of(p, a.lse, b, h)(i), 0};
  if (a.grad_output.data) {
    const Plane grad_output = plane_of(p, a.grad_output, b, h);
    const Plane output = plane_of(p, a.output, b, h);
    for (int64_t d = 0; d < p.head_dim_v; ++d) row.delta += grad_output(i, d) * output(i, d);
  }
  if (a.grad_lse.data) row.delta -= plane_of(p, a.grad_lse, b, h)(i);
  return row;
}

// d loss / d score: weight * (<grad_output_i, value_j> - delta_i).
double grad_score(const Problem& p, const BackwardArgs& a, const Row& row, double weight, int64_t b,
                  int64_t h, int64_t i, int64_t j) {
  double grad_weight = 0;
  if (a.grad_output.data) {
    const Plane grad_output = plane_of(p, a.grad_output, b, h);
    const Plane value = plane_of(p, p.value, b, h / p.group());
    for (int64_t d = 0; d < p.head_dim_v; ++d) grad_weight += grad_output(i, d) * value(j, d);
  }
  return weight * (grad_weight - row.delta);
}

}  // namespace

void output_row(const Problem& p, const ForwardResult& result, int64_t b, int64_t h, int64_t i) {
  const int64_t S = p.seqlen_k, Dv = p.head_dim_v;
  std::vector<double> weight(S);
  double max = -kInf;
  for (int64_t j = 0; j < S; ++j) {
    weight[j] = score(p, b, h, i, j);
    max = std::max(max, weight[j]);
  }
  double sum = 0;
  std::vector<double> out(Dv, 0.0);
  const Plane value = plane_of(p, p.value, b, h / p.group());
  for (int64_t j = 0; j < S; ++j) {
    if (weight[j] == -kInf) continue;  // masked: its value may be NaN
    weight[j] = std::exp(weight[j] - max);
    sum += weight[j];
    for (int64_t d = 0; d < Dv; ++d) out[d] += weight[j] * value(j, d);
  }
  const bool empty = sum == 0;
  for (int64_t d = 0; d < Dv; ++d) store(p, result.output, b, h, i, d, empty ? 0 : out[d] / sum);
  if (result.lse.data) store(p, result.lse, b, h, i, 0, empty ? -kInf : max + std::log(sum));
}

void grad_query_row(const Problem& p, const BackwardArgs& a, int64_t b, int64_t h, int64_t i) {
  const int64_t S = p.seqlen_k, D = p.head_dim;
  const Plane key = plane_of(p, p.key, b, h / p.group());
  const Row row = row_of(p, a, b, h, i);
  std::vector<double> grad(D, 0.0);
  for (int64_t j = 0; j < S; ++j) {
    const double s = score(p, b, h, i, j);
    if (s == -kInf) continue;
    const double ds = grad_score(p, a, row, std::exp(s - row.lse), b, h, i, j);
    for (int64_t d = 0; d < D; ++d) grad[d] += ds * key(j, d);
  }
  for (int64_t d = 0; d < D; ++d) store(p, a.grad_query, b, h, i, d, grad[d] * p.scale);
}

void grad_key_value_row(const Problem& p, const BackwardArgs& a, int64_t b, int64_t hk, int64_t j) {
  const int64_t L = p.seqlen_q, D = p.head_dim, Dv = p.head_dim_v;
  std::vector<double> grad_key(D, 0.0), grad_value(Dv, 0.0);
  for (int64_t h = hk * p.group(); h < (hk + 1) * p.group(); ++h) {
    const Plane query = plane_of(p, p.query, b, h);
    for (int64_t i = 0; i < L; ++i) {
      const double s = score(p, b, h, i, j);
      if (s == -kInf) continue;
      const Row row = row_of(p, a, b, h, i);
      const double weight = std::exp(s - row.lse);
      const double ds = grad_score(p, a, row, weight, b, h, i, j);
      for (int64_t d = 0; d < D; ++d) grad_key[d] += ds * query(i, d);
      if (!a.grad_output.data) continue;
      const Plane grad_output = plane_of(p, a.grad_output, b, h);
      for (int64_t d = 0; d < Dv; ++d) grad_value[d] += weight * grad_output(i, d);
    }
  }
  if (a.grad_key.data)
    for (int64_t d = 0; d < D; ++d) store(p, a.grad_key, b, hk, j, d, grad_key[d] * p.scale);
  if (a.grad_value.data)
    for (int64_t d = 0; d < Dv; ++d) store(p, a.grad_value, b, hk, j, d, grad_value[d]);
}

void attention_forward(const Problem& p, const ForwardResult& result) {
  for (int64_t b = 0; b < p.batch(); ++b)
    for (int64_t h = 0; h < p.heads; ++h)
      for (int64_t i = 0; i < p.seqlen_q; ++i) output_row(p, result, b, h, i);
}

void attention_backward(const Problem& p, const BackwardArgs& a) {
  for (int64_t b = 0; b < p.batch(); ++b) {
    if (a.grad_query.data)
      for (int64_t h = 0; h < p.heads; ++h)
        for (int64_t i = 0; i < p.seqlen_q; ++i) grad_query_row(p, a, b, h, i);
    for (int64_t hk = 0; hk < p.kv_heads; ++hk)
      for (int64_t j = 0; j < p.seqlen_k; ++j) grad_key_value_row(p, a, b, hk, j);
  }
}

}  // namespace qkv::reference
