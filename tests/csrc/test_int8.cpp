// Keys and values that are int8 in memory give the truth of the numbers that they stand for.
#include <gtest/gtest.h>

#include "cases.h"

namespace qkv::test {
namespace {

class Int8Test : public IsaTest {};

QKV_FOR_EACH_ISA(Int8Test);

// Rows of an item, few and in tiles; few in half precision are multiplied by words.
constexpr std::pair<DType, int64_t> kDTypesAndRows[] = {
    {DType::f32, 1}, {DType::f32, 40}, {DType::bf16, 1}, {DType::f16, 7}, {DType::bf16, 40}};

enum class Scales { tensor, head, token };

// One of the Workload's key and value as int8, and its scales. The scales are powers of two, so
// that every dtype has the numbers that they make, which become those of the Workload.
struct Quantized {
  Tensor numbers, scales;

  Quantized(Tensor& from, Scales which, Random& random, bool strided, bool at_front) {
    const Sizes sizes = from.sizes();
    Sizes scale_sizes = sizes;
    scale_sizes.back() = 1;
    Sizes scale_strides = dense_strides(scale_sizes);
    const size_t rank = sizes.size();
    if (which != Scales::token) scale_strides[rank - 2] = 0;
    if (which == Scales::tensor) std::fill(scale_strides.begin(), scale_strides.end(), 0);
    numbers =
        Tensor(Type::int8, sizes,
               strided ? random_strides(random, sizes, false) : dense_strides(sizes), at_front);
    scales = Tensor(Type::f32, scale_sizes, scale_strides, at_front);
    scales.fill([&] { return std::ldexp(1., int(draw(random, -7, -4))); });
    const std::vector<double> of_rows = scales.values();
    from = from.dense(from.type());  // one number of it may stand for several, whose scales differ
    std::vector<double> values = from.values();
    for (size_t i = 0; i < values.size(); ++i) {
      const double scale = of_rows[i / size_t(std::max<int64_t>(1, sizes.back()))];
      values[i] = std::clamp(std::nearbyint(values[i] / scale), -127., 127.);
    }
    size_t at = 0;
    numbers.fill([&] { return values[at++]; });
    at = 0;
    from.for_each([&](int64_t offset) {
      from.set(offset, values[at] * of_rows[at / size_t(std::max<int64_t>(1, sizes.back()))]);
      ++at;
    });
    numbers.make_read_only(), scales.make_read_only();
  }
};

struct Int8Workload {
  Workload& w;
  Quantized key, value;

  Int8Workload(Workload& workload, Scales which, Random& random)
      : w(workload),
        key(w.key, which, random, w.c.strided, w.c.at_front),
        value(w.value, which, random, w.c.strided, w.c.at_front) {}

  Problem problem() const {
    Problem p = w.problem();
    const auto put = [](Input& input, const Tensor& tensor, int64_t repeat) {
      input = tensor.input();
      input.strides.head_repeat = repeat;
    };
    put(p.key, key.numbers, w.c.key_head_repeat), put(p.key_scale, key.scales, w.c.key_head_repeat);
    put(p.value, value.numbers, w.c.value_head_repeat);
    put(p.value_scale, value.scales, w.c.value_head_repeat);
    return p;
  }
};

Case random_int8_step(Random& random) {
  Case c;
  c.int8 = true;
  do {
    do c.dtype = draw_dtype(random);
    while (c.dtype == DType::f64);
    c.batch = Sizes(draw(random, 0, 1), 2);
    c.kv_heads = draw(random, 1, 2), c.group = draw_from<int64_t>(random, {1, 2, 4, 7, 8, 24});
    c.L = draw(random, 0, 2) ? 1 : draw(random, 1, 70);
    c.S = draw(random, 0, 4) ? draw(random, 1, 400) : draw(random, 1, 2500);
    c.D = draw_from<int64_t>(random, {3, 8, 16, 64, 80, 96, 128, 576});
    c.Dv = draw(random, 0, 2) ? c.D : draw_from<int64_t>(random, {5, 16, 64, 80, 96, 128});
  } while (c.heads() * c.L * c.S * (c.D + c.Dv) > (kQuick ? 1 << 18 : 1 << 20));
  if (draw(random, 0, 1)) draw_options(random, c);
  c.strided = draw(random, 0, 3) == 0;
  c.at_front = draw(random, 0, 1);
  c.num_threads = int(draw(random, 1, 3));
  c.seed = random();
  return c;
}

TEST_P(Int8Test, RandomCases) {
  auto [n, end] = seeds(5, 100);
  Random random(1 + n);
  for (; n < end && !HasFailure(); ++n) {
    Workload w(random_int8_step(random));
    const Int8Workload int8(
        w, draw_from<Scales>(random, {Scales::tensor, Scales::head, Scales::token}), random);
    SCOPED_TRACE(::testing::Message() << w.c);
    expect_close(run_forward(w, int8.problem()), forward_truth(w), w.c);
  }
}

// Few rows and tiles, on every number of keys up to more than a block: the last vector of scales is
// rarely full.
TEST_P(Int8Test, EveryLength) {
  Random random(2);
  for (int64_t S = 0; S <= 130 && !HasFailure(); S += kQuick ? 13 : 1) {
    Case c;
    c.int8 = true;
    c.dtype = S % 2 ? DType::f32 : DType::bf16;
    c.group = 2, c.L = S % 3 ? 1 : 20, c.S = S, c.D = 32, c.Dv = 16;
    Workload w(c);
    const Int8Workload int8(w, Scales::token, random);
    expect_close(run_forward(w, int8.problem()), forward_truth(w), w.c);
  }
}

// A scale that is NaN or infinite makes rows of keys and values so, and those that nobody sees do
// not leak.
TEST_P(Int8Test, HiddenScalesDoNotLeak) {
  for (const auto& [dtype, L] : kDTypesAndRows) {
    Random random(3);
    Case c;
    c.int8 = true, c.dtype = dtype;
    c.group = 2, c.L = L, c.S = 300, c.D = 32, c.Dv = 16;
    c.window_left = 60, c.window_right = 0;
    Workload w(c);
    Int8Workload int8(w, Scales::token, random);
    Tensor key_scales = int8.key.scales.dense(Type::f32),
           value_scales = int8.value.scales.dense(Type::f32);
    for (int64_t j = 0; j < c.S - c.L - 60; ++j) {
      key_scales.set({0, j, 0}, kNaN);
      value_scales.set({0, j, 0}, j % 2 ? kInf : kNaN);
    }
    Problem p = int8.problem();
    p.key_scale = key_scales.input(), p.value_scale = value_scales.input();
    const Results actual = run_forward(w, p);
    expect_close(actual, forward_truth(w), w.c);
    // A row that sees such a key is NaN.
    p.window_left = -1;
    for (const double x : run_forward(w, p).output) EXPECT_TRUE(std::isnan(x));
  }
}

TEST_P(Int8Test, SameBitsForAnyNumberOfThreads) {
  Random random(4);
  for (const auto& [dtype, L] : kDTypesAndRows) {
    Case c;
    c.dtype = dtype;
    c.kv_heads = 2, c.group = 4, c.L = L, c.S = 1500, c.D = 64, c.Dv = 64;
    Workload w(c);
    const Int8Workload int8(w, Scales::token, random);
    const Results expected = run_forward(w, int8.problem());
    for (const int num_threads : {2, 3}) {
      Problem p = int8.problem();
      p.num_threads = num_threads;
      expect_identical(run_forward(w, p), expected);
    }
  }
}

// Pages [pages, Hkv, size, *] in the order of a table: the same bits as without pages.
TEST_P(Int8Test, Pages) {
  for (const auto& [dtype, L] : kDTypesAndRows) {
    for (const int64_t size : {1, 7, 16}) {
      Random random(5);
      Case c;
      c.dtype = dtype;
      c.kv_heads = 2, c.group = 2, c.L = L, c.S = kQuick ? 90 : 600, c.D = 32, c.Dv = 16;
      Workload w(c);
      const Int8Workload int8(w, Scales::token, random);
      const int64_t pages = (c.S + size - 1) / size;
      std::vector<int32_t> table;
      for (int64_t n = 0; n < pages; ++n) table.push_back(int32_t(pages - 1 - n));
      const auto paged = [&](const Tensor& from, Type type) {
        const int64_t cols = from.sizes().back();
        Tensor to(type, {pages, c.kv_heads, size, cols},
                  dense_strides({pages, c.kv_heads, size, cols}));
        for (int64_t h = 0; h < c.kv_heads; ++h)
          for (int64_t j = 0; j < c.S; ++j)
            for (int64_t d = 0; d < cols; ++d)
              to.set({table[size_t(j / size)], h, j % size, d}, from.get({h, j, d}));
        return to;
      };
      const Tensor key = paged(int8.key.numbers, Type::int8);
      const Tensor value = paged(int8.value.numbers, Type::int8);
      const Tensor key_scale = paged(int8.key.scales, Type::f32);
      const Tensor value_scale = paged(int8.value.scales, Type::f32);
      Problem p = w.problem();
      p.key = key.input(), p.value = value.input();
      p.key_scale = key_scale.input(), p.value_scale = value_scale.input();
      const int64_t rows = c.kv_heads * size;
      p.pages = {table.data(), size, rows * c.D, rows * c.Dv, rows, rows};
      expect_identical(run_forward(w, p), run_forward(w, int8.problem()));
    }
  }
}

}  // namespace
}  // namespace qkv::test
