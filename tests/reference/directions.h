// The directions in which the tensors of one head change, and how its scores change along them.
#pragma once

#include <cstdlib>
#include <vector>

#include "attention_jvp.h"
#include "reference/head.h"

namespace qkv::reference {

struct Directions {
  const Head& head;
  InputView query, key, value;
  std::vector<MaskView> masks;
  InputView alibi_slopes, sinks;

  Directions(const Head& of, const JvpArgs& a)
      : head(of),
        query(of.p, a.query, type_of(of.p.dtype), of.b, of.h),
        key(of.p, a.key, type_of(of.p.dtype), of.b, of.h / of.p.group()),
        value(of.p, a.value, type_of(of.p.dtype), of.b, of.h / of.p.group()),
        alibi_slopes(of.p, a.by_head[kAlibiSlopes], Type::f64, of.b, of.h),
        sinks(of.p, a.by_head[kSinks], Type::f64, of.b, of.h) {
    for (const Mask& mask : a.masks) masks.emplace_back(of.p, mask, of.b, of.h);
  }

  // The change of dot(query_i, key_j).
  double dot(int64_t i, int64_t j) const {
    double dot = 0;
    for (int64_t d = 0; d < head.p.head_dim; ++d) {
      if (query) dot += query(i, d) * head.key(j, d);
      if (key) dot += head.query(i, d) * key(j, d);
    }
    return dot;
  }

  // The change of score_ij.
  double score(int64_t i, int64_t j) const {
    double sum = query || key ? head.grad_dot(i, j) * dot(i, j) : 0;
    if (alibi_slopes) sum -= alibi_slopes(0, 0) * double(std::abs(head.ahead(i, j)));
    for (const MaskView& mask : masks) sum += mask.added(i, j);
    return sum;
  }
};

}  // namespace qkv::reference
