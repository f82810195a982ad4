#include "reference/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "strides.h"

namespace qkv::reference {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// A [rows, cols] matrix of one batch item and head, of any type, read as double.
struct Matrix {
  enum Type { kF32, kF64, kByte } type = kF32;
  const void* data = nullptr;
  int64_t first = 0, row = 0, col = 0;  // offset of [0, 0] and strides, in elements

  explicit operator bool() const { return data != nullptr; }
  double operator()(int64_t r, int64_t c = 0) const {
    const int64_t at = first + r * row + c * col;
    if (type == kF32) return static_cast<const float*>(data)[at];
    if (type == kF64) return static_cast<const double*>(data)[at];
    return static_cast<const uint8_t*>(data)[at];
  }
};

Matrix matrix(const Problem& p, const Input& t, Matrix::Type type, int64_t b, int64_t h) {
  return {type, t.data, plane_offset(p, t.strides, b, h), t.strides.row, t.strides.col};
}

Matrix matrix(const Problem& p, const Input& t, int64_t b, int64_t h) {
  return matrix(p, t, p.dtype == DType::f32 ? Matrix::kF32 : Matrix::kF64, b, h);
}

Matrix mask_matrix(const Problem& p, int64_t b, int64_t h) {
  if (p.mask_type == MaskType::none) return {};
  return matrix(p, p.mask,
                p.mask_type == MaskType::boolean ? Matrix::kByte
                : p.mask_type == MaskType::f32   ? Matrix::kF32
                                                 : Matrix::kF64,
                b, h);
}

void store(const Problem& p, const Output& t, int64_t b, int64_t h, int64_t r, int64_t c,
           double x) {
  if (!t.data) return;
  const int64_t at = plane_offset(p, t.strides, b, h) + r * t.strides.row + c * t.strides.col;
  if (p.dtype == DType::f32) {
    static_cast<float*>(t.data)[at] = float(x);
  } else {
    static_cast<double*>(t.data)[at] = x;
  }
}

// What the forward pass of query head h of batch item b reads.
struct Head {
  bool is_causal, mask_is_bool;
  double scale;
  int64_t D, Dv;
  Matrix query;  // [L, D]
  Matrix key;    // [S, D]
  Matrix value;  // [S, Dv]
  Matrix mask;   // [L, S]

  Head(const Problem& p, int64_t b, int64_t h)
      : is_causal(p.is_causal),
        mask_is_bool(p.mask_type == MaskType::boolean),
        scale(p.scale),
        D(p.head_dim),
        Dv(p.head_dim_v),
        query(matrix(p, p.query, b, h)),
        key(matrix(p, p.key, b, h / p.group())),
        value(matrix(p, p.value, b, h / p.group())),
        mask(mask_matrix(p, b, h)) {}

  bool attends(int64_t i, int64_t j) const {
    if (is_causal && j > i) return false;
    if (!mask) return true;
    return mask_is_bool ? mask(i, j) != 0 : mask(i, j) != -kInf;
  }

  double score(int64_t i, int64_t j) const {
    double dot = 0;
    for (int64_t d = 0; d < D; ++d) dot += query(i, d) * key(j, d);
    return scale * dot + (mask && !mask_is_bool ? mask(i, j) : 0);
  }
};

// What the backward pass reads besides.
struct BackwardHead : Head {
  Matrix output;       // [L, Dv]
  Matrix lse;          // [L, 1]
  Matrix grad_output;  // [L, Dv] or null
  Matrix grad_lse;     // [L, 1] or null

  BackwardHead(const Problem& p, const BackwardArgs& a, int64_t b, int64_t h)
      : Head(p, b, h),
        output(matrix(p, a.output, b, h)),
        lse(matrix(p, a.lse, b, h)),
        grad_output(matrix(p, a.grad_output, b, h)),
        grad_lse(matrix(p, a.grad_lse, b, h)) {}

  // The forward pass again: weight_ij = exp(score_ij - lse_i).
  double weight(int64_t i, int64_t j) const {
    return lse(i) == -kInf ? 0 : std::exp(score(i, j) - lse(i));
  }

  // Through    output_id = sum_j weight_ij * value_jd
  double grad_weight(int64_t i, int64_t j) const {
    double sum = 0;
    if (grad_output)
      for (int64_t d = 0; d < Dv; ++d) sum += grad_output(i, d) * value(j, d);
    return sum;
  }

  // Through    weight_ij = exp(score_ij - lse_i)    and    lse_i = log(sum_j exp(score_ij))
  //   grad_score_ij = weight_ij * (grad_weight_ij - sum_k weight_ik * grad_weight_ik + grad_lse_i)
  // where    sum_k weight_ik * grad_weight_ik = sum_d grad_output_id * output_id
  double grad_score(int64_t i, int64_t j) const {
    double grad = grad_weight(i, j);
    if (grad_output)
      for (int64_t d = 0; d < Dv; ++d) grad -= grad_output(i, d) * output(i, d);
    if (grad_lse) grad += grad_lse(i);
    return weight(i, j) * grad;
  }
};

}  // namespace

bool attends(const Problem& p, int64_t b, int64_t h, int64_t i, int64_t j) {
  return Head(p, b, h).attends(i, j);
}

void output_row(const Problem& p, const ForwardResult& result, int64_t b, int64_t h, int64_t i) {
  const Head head(p, b, h);
  const int64_t S = p.seqlen_k, Dv = p.head_dim_v;

  // score_j = scale * sum_d query_id * key_jd + mask_ij
  std::vector<double> score(S, -kInf);
  double max = -kInf;
  for (int64_t j = 0; j < S; ++j) {
    if (!head.attends(i, j)) continue;
    score[j] = head.score(i, j);
    max = std::max(max, score[j]);
  }

  // output_d = sum_j weight_j * value_jd,  weight_j = exp(score_j) / sum_k exp(score_k)
  std::vector<double> output(Dv, 0.0);
  double sum = 0;
  for (int64_t j = 0; j < S; ++j) {
    if (!head.attends(i, j)) continue;  // its value may be NaN
    const double weight = score[j] == -kInf ? 0 : std::exp(score[j] - max);
    sum += weight;
    for (int64_t d = 0; d < Dv; ++d) output[d] += weight * head.value(j, d);
  }
  for (int64_t d = 0; d < Dv; ++d)
    store(p, result.output, b, h, i, d, sum == 0 ? output[d] : output[d] / sum);

  // lse = log(sum_j exp(score_j)): -inf if there was nothing to attend to
  store(p, result.lse, b, h, i, 0, max + std::log(sum));
}

void grad_query_row(const Problem& p, const BackwardArgs& a, int64_t b, int64_t h, int64_t i) {
  const BackwardHead head(p, a, b, h);
  const int64_t S = p.seqlen_k, D = p.head_dim;
  std::vector<double> grad_query(D, 0.0);
  for (int64_t j = 0; j < S; ++j) {
    if (!head.attends(i, j)) continue;
    // score_ij = scale * sum_d query_id * key_jd + mask_ij
    const double grad_dot = p.scale * head.grad_score(i, j);
    for (int64_t d = 0; d < D; ++d) grad_query[d] += grad_dot * head.key(j, d);
  }
  for (int64_t d = 0; d < D; ++d) store(p, a.grad_query, b, h, i, d, grad_query[d]);
}

void grad_key_value_row(const Problem& p, const BackwardArgs& a, int64_t b, int64_t hk, int64_t j) {
  const int64_t L = p.seqlen_q, D = p.head_dim, Dv = p.head_dim_v;
  std::vector<double> grad_key(D, 0.0), grad_value(Dv, 0.0);
  for (int64_t h = hk * p.group(); h < (hk + 1) * p.group(); ++h) {
    const BackwardHead head(p, a, b, h);
    for (int64_t i = 0; i < L; ++i) {
      if (!head.attends(i, j)) continue;
      // score_ij = scale * sum_d query_id * key_jd + mask_ij
      const double grad_dot = p.scale * head.grad_score(i, j);
      for (int64_t d = 0; d < D; ++d) grad_key[d] += grad_dot * head.query(i, d);
      // output_id = sum_j weight_ij * value_jd
      if (!head.grad_output) continue;
      const double weight = head.weight(i, j);
      for (int64_t d = 0; d < Dv; ++d) grad_value[d] += weight * head.grad_output(i, d);
    }
  }
  for (int64_t d = 0; d < D; ++d) store(p, a.grad_key, b, hk, j, d, grad_key[d]);
  for (int64_t d = 0; d < Dv; ++d) store(p, a.grad_value, b, hk, j, d, grad_value[d]);
}

void attention_forward(const Problem& p, const ForwardResult& result) {
  for (int64_t b = 0; b < p.batch(); ++b)
    for (int64_t h = 0; h < p.heads; ++h)
      for (int64_t i = 0; i < p.seqlen_q; ++i) output_row(p, result, b, h, i);
}

void attention_backward(const Problem& p, const BackwardArgs& a) {
  for (int64_t b = 0; b < p.batch(); ++b) {
    for (int64_t h = 0; h < p.heads && a.grad_query.data; ++h)
      for (int64_t i = 0; i < p.seqlen_q; ++i) grad_query_row(p, a, b, h, i);
    if (!a.grad_key.data && !a.grad_value.data) continue;
    for (int64_t hk = 0; hk < p.kv_heads; ++hk)
      for (int64_t j = 0; j < p.seqlen_k; ++j) grad_key_value_row(p, a, b, hk, j);
  }
}

}  // namespace qkv::reference
