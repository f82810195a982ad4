// Products of few rows with matrices against plain sums, on every instruction set.
#include "row_product.h"

#include <gtest/gtest.h>

#include "cases.h"
#include "expect_near.h"

namespace qkv::test {
namespace {

// A call with its tensors [B, M, K], [B, N, K], [N] and [B, M, N].
class ProductCall {
 public:
  ProductCall(Random& random, DType dtype, bool along_depth) {
    p_.dtype = dtype, p_.batch = draw(random, 1, 3),
    p_.rows = std::max<int64_t>(1, draw(random, -2, kMostProductRows));
    p_.depth = draw(random, 0, 2000), p_.columns = draw(random, 0, 300);
    int64_t& whole = along_depth ? p_.depth : p_.columns;
    whole = std::max<int64_t>(1, whole / kProductUnit) * kProductUnit;
    const auto make = [&](int64_t rows, int64_t columns, bool is_input) {
      const Sizes sizes = {p_.batch, rows, columns};
      Tensor tensor(type_of(dtype), sizes, random_strides(random, sizes, is_input));
      tensor.fill([&] { return is_input ? draw_normal(random) : 0; });
      return tensor;
    };
    input_ = make(p_.rows, p_.depth, true), output_ = make(p_.rows, p_.columns, false);
    if (draw(random, 0, 1)) bias_ = make(1, p_.columns, true);
    const int64_t gap = draw(random, 0, 5);
    Sizes strides = {p_.columns * (p_.depth + gap), p_.depth + gap, 1};
    if (!along_depth) strides = {p_.depth * (p_.columns + gap), 1, p_.columns + gap};
    matrix_ = Tensor(type_of(dtype), {p_.batch, p_.columns, p_.depth}, strides);
    matrix_.fill([&] { return draw_normal(random); });
    for (const Tensor* tensor : {&input_, &matrix_, &bias_}) tensor->make_read_only();
  }

  RowProduct product(int threads) const {
    RowProduct p = p_;
    p.input = input_.input(), p.matrix = matrix_.input(), p.bias = bias_.input();
    p.output = output_.output(), p.num_threads = threads;
    return p;
  }
  const Tensor& output() const { return output_; }

  std::vector<double> expected() const {
    std::vector<double> all;
    for (int64_t b = 0; b < p_.batch; ++b)
      for (int64_t m = 0; m < p_.rows; ++m)
        for (int64_t n = 0; n < p_.columns; ++n) {
          double sum = bias_ ? bias_.get({0, 0, n}) : 0;
          for (int64_t k = 0; k < p_.depth; ++k)
            sum += input_.get({b, m, k}) * matrix_.get({b, n, k});
          all.push_back(sum);
        }
    return all;
  }

 private:
  RowProduct p_;
  Tensor input_, matrix_, bias_, output_;
};

class RowProductTest : public IsaTest {};

QKV_FOR_EACH_ISA(RowProductTest);

TEST_P(RowProductTest, RandomCases) {
  for (auto [seed, end] = seeds(8, 100); seed < end && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const DType dtype = kDTypes[seed % 4];
    const ProductCall call(random, dtype, seed / 4 % 2 == 0);
    const RowProduct p = call.product(1);
    ASSERT_TRUE(multiplies_rows(p));
    row_product(p);
    EXPECT_TRUE(call.output().canaries_alive());
    const double eps = dtype == DType::f64 ? 0x1p-50 : 0x1p-21;
    expect_near("output", call.output().values(), call.expected(), eps * double(p.depth + 1),
                dtype);
  }
}

TEST_P(RowProductTest, SameBitsForAnyNumberOfThreads) {
  for (int seed = 0; seed < 8; ++seed) {
    Random random(seed);
    const ProductCall call(random, kDTypes[seed % 4], seed < 4);
    row_product(call.product(1));
    const std::vector<double> one = call.output().values();
    row_product(call.product(3));
    EXPECT_EQ(call.output().values(), one);
  }
}

TEST(RowProduct, IsLeftToOthers) {
  Random random(1);
  RowProduct p = ProductCall(random, DType::f32, true).product(1);
  EXPECT_TRUE(multiplies_rows(p));
  p.rows = kMostProductRows + 1;
  EXPECT_FALSE(multiplies_rows(p));
  p.rows = 1, p.matrix.strides.col = 2;
  EXPECT_FALSE(multiplies_rows(p));
  p.matrix.strides.col = 1, p.depth += 1;
  EXPECT_FALSE(multiplies_rows(p));
}

}  // namespace
}  // namespace qkv::test
