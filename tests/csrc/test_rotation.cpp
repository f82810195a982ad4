// Rotations against the reference, on every instruction set.
#include <gtest/gtest.h>

#include "cases.h"
#include "reference/reference.h"

namespace qkv::test {
namespace {

constexpr DType kAll[] = {DType::f32, DType::f64, DType::bf16, DType::f16};

// A call with all its tensors. The tables broadcast over the batch, or do not.
class RotationCall {
 public:
  explicit RotationCall(Random& random, DType dtype, int64_t D) : r_{} {
    r_.dtype = dtype, r_.head_dim = D;
    r_.rotary_pairs = draw(random, 0, 2) ? D / 2 : draw(random, 0, D / 2);
    r_.is_interleaved = draw(random, 0, 1), r_.eps = 1e-3;
    r_.seqlen = draw(random, 1, 70), r_.batch_rank = 2;
    r_.batch_sizes = {draw(random, 1, 2), draw(random, 1, 3)};
    const bool strided = draw(random, 0, 1);
    const auto make = [&](DType type, int64_t heads, int64_t rows, int64_t columns, bool is_input,
                          bool broadcasts) {
      const Sizes sizes = {r_.batch_sizes[0], r_.batch_sizes[1], heads, rows, columns};
      Sizes strides = strided ? random_strides(random, sizes, is_input) : dense_strides(sizes);
      if (broadcasts) strides[0] = strides[1] = 0;
      Tensor tensor(type_of(type), sizes, strides);
      tensor.fill([&] { return is_input ? draw_normal(random) : 0; });
      return tensor;
    };
    const auto type = [&] { return draw(random, 0, 1) ? dtype : DType::f32; };
    const bool one_table = draw(random, 0, 1), one_weight = draw(random, 0, 1);
    for (int t = 0; t < 2; ++t) {
      const int64_t heads = r_.tensors[t].heads = draw(random, t, 5);
      x_[t] = make(dtype, heads, r_.seqlen, D, true, false);
      y_[t] = make(dtype, heads, r_.seqlen, D, false, false);
      grad_[t] = make(dtype, heads, r_.seqlen, D, true, false);
      table_types_[t] = type(), weight_types_[t] = type();
      table_[t] = make(table_types_[t], 1, r_.seqlen, r_.rotary_pairs, true, one_table);
      grad_table_[t] = make(table_types_[t], 1, r_.seqlen, r_.rotary_pairs, false, one_table);
      if (draw(random, 0, 2) == 0) continue;
      weight_[t] = make(weight_types_[t], 1, 1, D, true, one_weight);
      grad_weight_[t] = make(weight_types_[t], 1, 1, D, false, one_weight);
    }
  }

  // The same numbers, all in f64.
  RotationCall(const RotationCall& other) : r_(other.r_) {
    r_.dtype = DType::f64;
    const auto copy = [](const Tensor& from) {
      if (!from) return Tensor();
      Tensor to(Type::f64, from.sizes(), from.own_strides());
      from.for_each([&](int64_t at) { to.set(at, from.get(at)); });
      return to;
    };
    for (int t = 0; t < 2; ++t) {
      table_types_[t] = weight_types_[t] = DType::f64;
      x_[t] = copy(other.x_[t]), y_[t] = copy(other.y_[t]), grad_[t] = copy(other.grad_[t]);
      table_[t] = copy(other.table_[t]), grad_table_[t] = copy(other.grad_table_[t]);
      weight_[t] = copy(other.weight_[t]), grad_weight_[t] = copy(other.grad_weight_[t]);
    }
  }

  Rotation rotation(int threads = 1) const {
    Rotation r = r_;
    r.num_threads = threads;
    r.cos = {table_[0].input(), table_types_[0]}, r.sin = {table_[1].input(), table_types_[1]};
    for (int t = 0; t < 2; ++t) {
      r.tensors[t].input = x_[t].input(), r.tensors[t].output = y_[t].output();
      r.tensors[t].weight = {weight_[t].input(), weight_types_[t]};
    }
    return r;
  }
  RotationGradients gradients() const {
    RotationGradients g;
    for (int t = 0; t < 2; ++t) {
      g.grad_output[t] = grad_[t].input();
      g.grad_weight[t] = {grad_weight_[t].output(), weight_types_[t]};
    }
    g.grad_cos = {grad_table_[0].output(), table_types_[0]};
    g.grad_sin = {grad_table_[1].output(), table_types_[1]};
    return g;
  }

  // All results in their order, those of the last pass.
  std::vector<const Tensor*> results(bool is_backward) const {
    if (!is_backward) return {&y_[0], &y_[1]};
    return {&y_[0], &y_[1], &grad_table_[0], &grad_table_[1], &grad_weight_[0], &grad_weight_[1]};
  }
  void make_inputs_read_only() const {
    for (const auto* tensors : {&x_, &grad_, &table_, &weight_})
      for (const Tensor& tensor : *tensors) tensor.make_read_only();
  }

 private:
  Rotation r_;
  std::array<Tensor, 2> x_, y_, grad_, table_, grad_table_, weight_, grad_weight_;
  std::array<DType, 2> table_types_{}, weight_types_{};
};

class RotationTest : public IsaTest {
 protected:
  // Every result is rounded once, of numbers and sums in f32, or f64.
  static void expect_close(const RotationCall& call, const RotationCall& exact, bool is_backward) {
    const auto found = call.results(is_backward), truth = exact.results(is_backward);
    for (size_t i = 0; i < found.size(); ++i) {
      SCOPED_TRACE(i);
      EXPECT_TRUE(found[i]->canaries_alive());
      const std::vector<double> actual = found[i]->values(), expected = truth[i]->values();
      ASSERT_EQ(actual.size(), expected.size());
      double largest = 0;
      for (const double x : expected) largest = std::max(largest, std::abs(x));
      const Type type = found[i]->type();
      const double eps = type == Type::bf16                                         ? 0x1p-8
                         : type == Type::f16                                        ? 0x1p-11
                         : call.rotation().dtype == DType::f64 && type == Type::f64 ? 0x1p-48
                                                                                    : 0x1p-19;
      for (size_t n = 0; n < actual.size(); ++n)
        ASSERT_NEAR(actual[n], expected[n], eps * std::abs(expected[n]) + 0x1p-19 * largest) << n;
    }
  }

  static void expect_truth(const RotationCall& call) {
    const RotationCall exact(call);
    call.make_inputs_read_only();
    rotation_forward(call.rotation());
    reference::rotation_forward(exact.rotation());
    expect_close(call, exact, false);
    rotation_backward(call.rotation(), call.gradients());
    reference::rotation_backward(exact.rotation(), exact.gradients());
    expect_close(call, exact, true);
  }
};

QKV_FOR_EACH_ISA(RotationTest);

TEST_P(RotationTest, RandomCases) {
  for (auto [seed, end] = seeds(10, 200); seed < end && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const DType dtype = kAll[seed % 4];
    const std::vector<int64_t> sizes = {1, 6, 32, 64, 65, 80, 96, 128};
    expect_truth(RotationCall(random, dtype, draw_from(random, sizes)));
  }
}

TEST_P(RotationTest, SameBitsForAnyNumberOfThreads) {
  for (const DType dtype : kAll) {
    Random random(7);
    const RotationCall call(random, dtype, 96);
    std::vector<std::vector<double>> one;
    for (const int threads : {1, 2, 3}) {
      rotation_backward(call.rotation(threads), call.gradients());
      std::vector<std::vector<double>> found;
      for (const Tensor* tensor : call.results(true)) found.push_back(tensor->values());
      if (threads == 1) one = found;
      EXPECT_EQ(found, one);
    }
  }
}

// Item b begins at row offsets[b] of the tables.
TEST_P(RotationTest, OffsetsOfItems) {
  Random random(3);
  const int64_t D = 64, rows = 50, L = 4, offsets[] = {0, 46, 17};
  Tensor x(Type::f32, {3, 2, L, D}, dense_strides({3, 2, L, D}));
  Tensor y(Type::f32, x.sizes(), dense_strides(x.sizes()));
  Tensor expected(Type::f32, x.sizes(), dense_strides(x.sizes()));
  Tensor table(Type::f32, {3, 1, rows, D / 2}, {0, 0, D / 2, 1});
  for (Tensor* tensor : {&x, &table}) tensor->fill([&] { return draw_normal(random); });
  Rotation r;
  r.batch_rank = 1, r.batch_sizes[0] = 3, r.seqlen = L, r.head_dim = D, r.rotary_pairs = D / 2;
  r.cos = r.sin = {table.input(), DType::f32};
  r.offsets = offsets;
  r.tensors[0].heads = 2, r.tensors[0].input = x.input(), r.tensors[0].output = y.output();
  rotation_forward(r);
  r.tensors[0].output = expected.output();
  reference::rotation_forward(r);
  const std::vector<double> found = y.values(), truth = expected.values();
  for (size_t n = 0; n < truth.size(); ++n) ASSERT_NEAR(found[n], truth[n], 1e-6) << n;
}

// A sum over no batch items, or over no positions, is 0 and not what the memory had before.
TEST_P(RotationTest, SumsOverNothing) {
  const int64_t D = 6, L = 3;
  for (const Sizes& sizes : {Sizes{0, L}, Sizes{2, 0}}) {
    Rotation r;
    r.batch_rank = 1, r.batch_sizes[0] = sizes[0], r.seqlen = sizes[1];
    r.head_dim = D, r.rotary_pairs = D / 2;
    Tensor grad_table(Type::f32, {1, 1, r.seqlen, D / 2}, {0, 0, D / 2, 1});
    Tensor grad_weight(Type::f32, {2, 1, 1, D}, {r.seqlen ? 0 : D, 0, 0, 1});
    for (Tensor* tensor : {&grad_table, &grad_weight}) tensor->fill([] { return kNaN; });
    RotationGradients g;
    g.grad_cos = {grad_table.output(), DType::f32}, g.grad_weight[0] = {grad_weight.output()};
    rotation_backward(r, g);
    for (const Tensor* tensor : {&grad_table, &grad_weight})
      for (const double x : tensor->values()) EXPECT_EQ(x, 0);
  }
}

}  // namespace
}  // namespace qkv::test
