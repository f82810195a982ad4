#include <iterator>

#include "case.h"

namespace qkv::test {
namespace {

bool one_in(Random& random, int64_t n) { return draw(random, 0, n - 1) == 0; }

// One of the `usual` sizes, or any from 1 to `most`.
int64_t draw_size(Random& random, const Sizes& usual, int64_t most) {
  return draw(random, 0, 1) ? draw(random, 1, most) : draw_from(random, usual);
}

// One side of a window: open, or as wide as 0 keys, a few, any number, or more than there are.
int64_t draw_window(Random& random, const Case& c) {
  return draw_from<int64_t>(
      random, {-1, 0, draw(random, 1, 9), draw(random, 0, c.L + c.S), int64_t{1} << 40});
}

// A part of a whole that is larger on every side, or not.
Shard draw_shard(Random& random, const Case& c) {
  const auto more = [&] { return draw(random, 0, 1) ? 0 : draw(random, 0, 150); };
  Shard shard;
  shard.query_offset = more(), shard.key_offset = more(), shard.head_offset = draw(random, 0, 5);
  shard.seqlen_q = shard.query_offset + c.L + more();
  shard.seqlen_k = shard.key_offset + c.S + more();
  shard.heads = shard.head_offset + c.heads() + draw(random, 0, 5);
  return shard;
}

}  // namespace

DType draw_dtype(Random& random) {
  return draw_from<DType>(random, {std::begin(kDTypes), std::end(kDTypes)});
}

MaskType draw_mask(Random& random, DType dtype) {
  std::vector<MaskType> types = all_masks(dtype);
  types.push_back(MaskType::none);
  return draw_from(random, types);
}

void draw_options(Random& random, Case& c) {
  const bool any = !one_in(random, 3);
  const auto option = [&](int64_t n) { return any && one_in(random, n); };
  c.is_causal = draw(random, 0, 1);
  c.mask_type = draw_mask(random, c.dtype);
  if (option(2)) c.window_left = draw_window(random, c), c.window_right = draw_window(random, c);
  if (option(3)) c.softcap = draw_from<double>(random, {1, 3, 50}) / 2;
  c.alibi_slopes = option(3);
  c.sinks = option(3);
  if (option(2)) c.dropout_p = draw_from<double>(random, {1, 5, 9, 10}) / 10;
  c.dropout_batch = one_in(random, 2) ? 0 : int64_t{1} << draw(random, 0, 40);
  c.grad_weights = option(3);
  c.grad_mask = c.float_mask() && one_in(random, 2);
  c.grad_mask_keys = c.float_mask() && one_in(random, 3);
  c.grad_mask_queries = c.float_mask() && one_in(random, 3);
  c.grad_alibi_slopes = c.alibi_slopes && one_in(random, 2);
  c.grad_sinks = c.sinks && one_in(random, 2);
  c.weights = option(3);
  c.weights_factor = draw_from<double>(random, {1, 0.25});
  c.share_batch = one_in(random, 2);
  c.share_heads = one_in(random, 2);
  if (option(3)) c.shard = draw_shard(random, c);
  if (option(4)) c.key_spans = draw(random, 1, 3);
  if (!option(3)) return;
  c.bias_type = draw_from(random, float_masks(c.dtype));
  c.grad_bias = one_in(random, 2);
  c.grad_bias_keys = one_in(random, 3);
  c.grad_bias_queries = one_in(random, 3);
}

Case random_case(uint64_t seed) {
  Random random(seed);
  const int64_t most_work = (kQuick ? 1 : 3) << 18;
  for (;;) {
    Case c;
    c.seed = seed;
    c.own_seeds = seed % 3 == 0;
    c.dtype = draw_dtype(random);
    c.batch.resize(draw(random, 0, 3));
    for (int64_t& b : c.batch) b = draw(random, 0, 9) ? draw(random, 1, 3) : 0;
    c.kv_heads = draw(random, 1, 3);
    c.group = draw_from<int64_t>(random, {1, 1, 2, 3, 8});
    const Sizes lengths = {0, 1, 1, 2, 4, 8, 15, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 513};
    const Sizes dims = {1, 2, 8, 15, 16, 17, 32, 33, 40, 64, 65, 80, 128, 256, 257};
    c.L = draw_size(random, lengths, 300);
    c.S = draw_size(random, lengths, c.L < 4 ? 3000 : 300);
    c.D = draw_size(random, dims, 300);
    c.Dv = draw(random, 0, 1) ? c.D : draw_size(random, dims, 300);
    draw_options(random, c);
    if (draw(random, 0, 3) == 0) c.scale = draw_normal(random);
    if (draw(random, 0, 3) == 0) c.key_head_repeat = c.kv_heads;
    if (draw(random, 0, 3) == 0) c.value_head_repeat = c.kv_heads;
    c.lse = draw(random, 0, 3);
    c.grad_output = draw(random, 0, 7);
    c.grad_lse = draw(random, 0, 1);
    c.grad_query = draw(random, 0, 3);
    c.grad_key = draw(random, 0, 3);
    c.grad_value = draw(random, 0, 3);
    c.strided = draw(random, 0, 1);
    c.at_front = draw(random, 0, 1);
    c.num_threads = int(draw(random, 1, 3));
    int64_t work = c.kv_heads * c.group * c.L * c.S * (c.D + c.Dv);
    for (int64_t b : c.batch) work *= b;
    if (work <= most_work) return c;
  }
}

}  // namespace qkv::test
