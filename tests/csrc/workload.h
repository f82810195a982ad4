// The inputs of a Case. They are standard normal numbers; masks let a query see about 4 of 5 keys,
// and now and then none at all.
#pragma once

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

#include "case.h"

namespace qkv::test {

// See Case::own_seeds; with both halves of 32 bits in use.
constexpr int64_t kOwnSeeds[] = {5, -0x123456789abcdef, int64_t{7} << 40};

struct Workload {
  Case c;
  Tensor query, key, value, mask, bias, key_spans, alibi_slopes, sinks, grad_output, grad_lse,
      grad_weights;

  explicit Workload(const Case& which) : c(which) {
    Random random(c.seed);
    const int64_t H = c.heads();
    query = input(random, type_of(c.dtype), H, c.L, c.D);
    key = input(random, type_of(c.dtype), c.kv_heads / c.key_head_repeat, c.S, c.D);
    value = input(random, type_of(c.dtype), c.kv_heads / c.value_head_repeat, c.S, c.Dv);
    if (c.grad_output) grad_output = input(random, type_of(c.dtype), H, c.L, c.Dv);
    if (c.grad_lse) grad_lse = input(random, compute_element(), H, c.L, 1);
    if (c.mask_type != MaskType::none) mask = make_mask(random, c.mask_type, c.mask_strides);
    if (c.grad_weights) grad_weights = input(random, compute_element(), H, c.L, c.S);
    // Slopes are a sixteenth of that, so that scores of a few hundred keys away are no larger than
    // the others.
    if (c.alibi_slopes) alibi_slopes = input(random, Type::f64, H, 1, 1, 1. / 16);
    if (c.sinks) sinks = input(random, Type::f64, H, 1, 1);
    if (c.bias_type != MaskType::none) bias = make_mask(random, c.bias_type, {});
    if (c.key_spans) key_spans = make_spans(random);
  }

  std::vector<Tensor*> inputs() {
    return {&query,        &key,   &value,       &mask,     &bias,        &key_spans,
            &alibi_slopes, &sinks, &grad_output, &grad_lse, &grad_weights};
  }
  std::vector<const Tensor*> inputs() const {
    const auto all = const_cast<Workload*>(this)->inputs();
    return {all.begin(), all.end()};
  }

  Sizes sizes(int64_t heads, int64_t rows, int64_t cols) const {
    Sizes s = c.batch;
    s.insert(s.end(), {heads, rows, cols});
    return s;
  }

  // An uninitialised output, with gaps between its elements if the case is strided.
  Tensor make_output(Type type, int64_t heads, int64_t rows, int64_t cols) const {
    const Sizes s = sizes(heads, rows, cols);
    return {type, s, output_strides(s), c.at_front};
  }

  // Outputs [B..., H, L, S] that the passes add to, shared as the case says. They hold eighths,
  // which every dtype has, and the same numbers for every batch item.
  Tensor make_weights() const { return make_sum(compute_element(), /*over_batch=*/false); }
  Tensor make_grad_mask() const { return make_sum(compute_element(), c.share_batch); }

  Problem problem() const {
    Problem p;
    p.dtype = c.dtype;
    p.batch_rank = int(c.batch.size());
    std::copy(c.batch.begin(), c.batch.end(), p.batch_sizes.begin());
    p.heads = c.heads(), p.kv_heads = c.kv_heads;
    p.seqlen_q = c.L, p.seqlen_k = c.S, p.head_dim = c.D, p.head_dim_v = c.Dv;
    p.scale = c.effective_scale();
    p.is_causal = c.is_causal;
    p.window_left = c.window_left, p.window_right = c.window_right;
    p.softcap = c.softcap;
    p.query = query.input(), p.key = key.input(), p.value = value.input();
    p.key.strides.head_repeat = c.key_head_repeat;
    p.value.strides.head_repeat = c.value_head_repeat;
    p.masks = {Mask{c.mask_type, mask.input()}, Mask{c.bias_type, bias.input()}};
    p.key_spans = {key_spans.input(), c.key_spans};
    p.by_head[kAlibiSlopes] = alibi_slopes.input(), p.by_head[kSinks] = sinks.input();
    p.dropout_p = c.dropout_p, p.dropout_batch = c.dropout_batch;
    p.shard = c.shard;
    // Multiplied, so that both 32-bit halves are in use.
    p.dropout_seed = (c.dropout_seed ? c.dropout_seed : c.seed) * 0x9E3779B97F4A7C15;
    if (c.own_seeds && !c.batch.empty()) {
      p.dropout_seeds = kOwnSeeds;
      p.dropout_items = std::accumulate(c.batch.begin() + 1, c.batch.end(), int64_t{1},
                                        std::multiplies<int64_t>());
    }
    p.num_threads = c.num_threads;
    return p;
  }

  Type compute_element() const { return type_of(compute_type(c.dtype)); }

  // A copy with the same numbers in f64, for the reference.
  Workload in_f64() const {
    Workload copy;
    copy.c = c;
    copy.c.dtype = DType::f64;
    if (c.float_mask()) copy.c.mask_type = MaskType::f64;
    if (c.bias_type != MaskType::none) copy.c.bias_type = MaskType::f64;
    copy.c.strided = copy.c.at_front = false;
    const auto from = inputs();
    const auto to = copy.inputs();
    for (size_t n = 0; n < from.size(); ++n)
      *to[n] = from[n]->dense(from[n] == &mask        ? type_of(copy.c.mask_type)
                              : from[n] == &key_spans ? Type::int32
                                                      : Type::f64);
    return copy;
  }

 private:
  Workload() = default;

  Sizes output_strides(const Sizes& s) const {
    Random random(c.seed + 1);
    return c.strided ? random_strides(random, s, false) : dense_strides(s);
  }

  Tensor make_sum(Type type, bool over_batch) const {
    const Sizes s = sizes(c.heads(), c.L, c.S);
    Sizes strides = output_strides(s);
    const size_t rank = c.batch.size();
    if (over_batch) std::fill_n(strides.begin(), rank, 0);
    if (c.share_heads) strides[rank] = 0;
    Tensor t(type, s, strides, c.at_front);
    int64_t n = 0;
    const int64_t item = c.heads() * c.L * c.S;
    t.fill([&] { return double(n++ % item % 17 - 8) / 8; });
    return t;
  }

  Tensor input(Random& random, Type type, int64_t heads, int64_t rows, int64_t cols,
               double size = 1) const {
    const Sizes s = sizes(heads, rows, cols);
    Tensor t(type, s, c.strided ? random_strides(random, s, true) : dense_strides(s), c.at_front);
    t.fill([&] { return size * draw_normal(random); });
    return t;
  }

  // Begins and ends of spans: anywhere, so that some overlap; one in four is empty, one in eight
  // has all keys.
  Tensor make_spans(Random& random) const {
    const Sizes s = sizes(c.heads(), c.L, 2 * c.key_spans);
    Tensor t(Type::int32, s, c.strided ? random_strides(random, s, true) : dense_strides(s),
             c.at_front);
    bool is_begin = true;
    int64_t begin = 0;
    t.fill([&]() -> double {
      is_begin = !is_begin;
      if (is_begin) return double(draw(random, 0, 3) == 0 ? begin : draw(random, begin, c.S));
      begin = draw(random, 0, 7) == 0 ? 0 : draw(random, 0, c.S);
      return double(begin);
    });
    return t;
  }

  Tensor make_mask(Random& random, MaskType type, const Sizes& strides) const {
    const Sizes s = sizes(c.heads(), c.L, c.S);
    Tensor t(type_of(type), s,
             !strides.empty() ? strides
             : c.strided      ? random_strides(random, s, true)
                              : dense_strides(s),
             c.at_front);
    const bool is_bool = type == MaskType::boolean;
    int64_t column = 0;
    bool row_masked = false;
    t.fill([&]() -> double {
      if (column++ % c.S == 0) row_masked = draw(random, 0, 15) == 0;
      const bool masked = row_masked || draw(random, 0, 4) == 0;
      if (is_bool) return masked ? 0 : draw(random, 1, 255);
      return masked ? -kInf : draw_normal(random);
    });
    return t;
  }
};

}  // namespace qkv::test
