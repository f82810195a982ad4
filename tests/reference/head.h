// One query head h of one batch item b: the tensors that it reads, which keys its queries may see,
// and their scores. A new option of the scores belongs here.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <vector>

#include "reference/philox.h"
#include "reference/view.h"

namespace qkv::reference {

constexpr double kInf = std::numeric_limits<double>::infinity();

// One mask, of a query head h of a batch item b.
struct MaskView {
  MaskType type;
  InputView at;  // [L, S] or null

  MaskView(const Problem& p, const Mask& mask, int64_t b, int64_t h)
      : type(mask.type),
        at(p, mask.type == MaskType::none ? Input{} : mask.input, type_of(mask.type), b, h) {}

  bool hides(int64_t i, int64_t j) const {
    if (!at) return false;
    return type == MaskType::boolean ? at(i, j) == 0 : at(i, j) == -kInf;
  }
  double added(int64_t i, int64_t j) const {
    return at && type != MaskType::boolean ? at(i, j) : 0;
  }
};

struct Head {
  const Problem& p;
  int64_t b, h;
  InputView query;  // [L, D]
  InputView key;    // [S, D]
  InputView value;  // [S, Dv]
  std::vector<MaskView> masks;
  InputView key_spans;     // [L, 2 * count] or null
  InputView alibi_slopes;  // [1, 1] or null
  InputView sinks;         // [1, 1] or null

  Head(const Problem& p, int64_t b, int64_t h)
      : p(p),
        b(b),
        h(h),
        query(p, p.query, type_of(p.dtype), b, h),
        key(p, p.key, p.pages.key_stride, b, h / p.group()),
        value(p, p.value, p.pages.value_stride, b, h / p.group()),
        key_spans(p, p.key_spans.input, Type::int32, b, h),
        alibi_slopes(p, p.by_head[kAlibiSlopes], Type::f64, b, h),
        sinks(p, p.by_head[kSinks], Type::f64, b, h) {
    for (const Mask& mask : p.masks) masks.emplace_back(p, mask, b, h);
  }

  // How far key j lies ahead of query i, where the last query and the last key are side by side.
  int64_t ahead(int64_t i, int64_t j) const { return j - (i + p.bottom_right()); }

  bool in_a_span(int64_t i, int64_t j) const {
    for (int64_t n = 0; n < p.key_spans.count; ++n)
      if (key_spans(i, 2 * n) <= double(j) && double(j) < key_spans(i, 2 * n + 1)) return true;
    return false;
  }

  // Query i may see key j: neither their positions nor a mask hide it, nor do spans.
  bool attends(int64_t i, int64_t j) const {
    if (key_spans && !in_a_span(i, j)) return false;
    if (p.is_causal && j > i + p.top_left()) return false;
    if (p.window_left >= 0 && ahead(i, j) < -p.window_left) return false;
    if (p.window_right >= 0 && ahead(i, j) > p.window_right) return false;
    return std::none_of(masks.begin(), masks.end(),
                        [&](const MaskView& mask) { return mask.hides(i, j); });
  }

  double scaled_dot(int64_t i, int64_t j) const {
    double dot = 0;
    for (int64_t d = 0; d < p.head_dim; ++d) dot += query(i, d) * key(j, d);
    return p.scale * dot;
  }

  // softcap(scale * dot(query_i, key_j)) - slope * |i + S - L - j| + sum_m mask_m,ij
  double score(int64_t i, int64_t j) const {
    double score = scaled_dot(i, j);
    if (p.softcap > 0) score = p.softcap * std::tanh(score / p.softcap);
    if (alibi_slopes) score -= alibi_slopes(0, 0) * double(std::abs(ahead(i, j)));
    for (const MaskView& mask : masks) score += mask.added(i, j);
    return score;
  }

  // This is d score_ij / d dot(query_i, key_j), in which the derivative of tanh is 1 - tanh^2.
  double grad_dot(int64_t i, int64_t j) const {
    if (!(p.softcap > 0)) return p.scale;
    const double tanh = std::tanh(scaled_dot(i, j) / p.softcap);
    return p.scale * (1 - tanh * tanh);
  }

  // This is d grad_dot_ij / d dot(query_i, key_j), in which the derivative of 1 - tanh^2 is
  // -2 tanh (1 - tanh^2).
  double curve_of_dot(int64_t i, int64_t j) const {
    if (!(p.softcap > 0)) return 0;
    const double tanh = std::tanh(scaled_dot(i, j) / p.softcap);
    return p.scale * p.scale * -2 * tanh * (1 - tanh * tanh) / p.softcap;
  }

  // The sink joins the scores in the softmax's denominator. It is -inf where there is none.
  double sink() const { return sinks ? sinks(0, 0) : -kInf; }

  // This is exp(sink - base), what the sink adds to a sum over row i that is relative to base. It
  // is 1 in a row all of whose scores are -inf, even if the sink is NaN or +inf: such a row is
  // relative to its sink, and has output 0.
  double share_of_sink(int64_t i, double base) const {
    const double share = sink() == -kInf ? 0 : std::exp(sink() - base);
    return std::isnan(share) && !sees_any(i) ? 1 : share;
  }
  bool sees_any(int64_t i) const {
    for (int64_t j = 0; j < p.seqlen_k; ++j)
      if (attends(i, j) && score(i, j) != -kInf) return true;
    return false;
  }

  // This is kept_ij / (1 - dropout_p). A weight that is dropped is multiplied by 0, so that NaN
  // stays NaN, as in torch.
  double keep(int64_t i, int64_t j) const {
    if (!(p.dropout_p > 0)) return 1;
    const uint32_t threshold = dropout_threshold(p.dropout_p);
    const Shard& of = p.shard;
    return kept(p.seed_of(b), threshold, p.dropout_plane(b, h), of.query_offset + i,
                of.key_offset + j)
               ? dropout_scale(p.dropout_p)
               : 0;
  }
};

}  // namespace qkv::reference
