// The micro-kernel C = beta * C + A * B against a double loop.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cases.h"
#include "dispatch/kernel_table.h"
#include "parts/kernel_parts.h"

namespace qkv::test {
namespace {

// Strides of A [rows, depth], one of which is 1.
struct Arrangement {
  const char* name;
  int64_t row, col;
};

std::vector<Arrangement> arrangements(int64_t rows, int64_t depth) {
  return {{"row-major", depth + 3, 1},
          {"row-major, no gap", depth, 1},
          {"column-major", 1, rows + 2},
          {"one row", 0, 1},
          {"one column", 1, 0}};
}

class MicroKernelTest : public IsaTest {
 protected:
  Tensor matrix(int64_t rows, int64_t cols, int64_t row, int64_t col) {
    Tensor t(type_of(dtype), {1, rows, cols}, {0, row, col}, draw(random, 0, 1));
    t.fill([&] { return draw_normal(random); });
    return t;
  }

  void check(int64_t rows, int64_t cols, int64_t depth, const Arrangement& pattern, int beta) {
    SCOPED_TRACE(::testing::Message() << "rows " << rows << " columns " << cols << " depth "
                                      << depth << " A " << pattern.name << " beta " << beta);
    const int64_t lanes = active_implementation().kernels(dtype).lanes;
    const int64_t wide = (cols + lanes - 1) / lanes * lanes;
    const int64_t b_row = cols + draw(random, 0, 1) * 3, c_row = wide + draw(random, 0, 1) * 5;
    const Tensor a = matrix(rows, depth, pattern.row, pattern.col);
    const Tensor b = matrix(depth, cols, b_row, 1);
    const Tensor factors = matrix(1, cols, 0, 1);
    Tensor c = matrix(rows, wide, c_row, 1);
    if (beta == 0) c.fill([] { return kNaN; });  // C must not be read
    const Tensor before = c.dense(Type::f64);
    for (const Tensor* t : {&a, &b, &factors}) t->make_read_only();

    active_parts(dtype).gemm(rows, cols, depth, a.data(), pattern.row, pattern.col, b.data(), b_row,
                             c.data(), c_row, beta, factors.data());
    EXPECT_TRUE(c.canaries_alive()) << "something beside C was written";
    const double eps = dtype == DType::f32 ? std::numeric_limits<float>::epsilon()
                                           : std::numeric_limits<double>::epsilon();
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t n = 0; n < cols; ++n) {
        const double factor = beta == 2 ? factors.get({0, 0, n}) : beta;
        double sum = beta ? factor * before.get({0, i, n}) : 0, size = std::abs(sum);
        for (int64_t k = 0; k < depth; ++k) {
          const double product = a.get({0, i, k}) * b.get({0, k, n});
          sum += product, size += std::abs(product);
        }
        // The bound for any order of summation: half a unit in the last place for each addition.
        const double bound = double(depth + 3) * eps / 2 * size;
        ASSERT_LE(std::abs(c.get({0, i, n}) - sum), bound) << "at " << i << ", " << n;
      }
      for (int64_t n = cols; n < wide; ++n)
        ASSERT_EQ(c.get({0, i, n}), 0) << "at " << i << ", " << n;
    }
  }

  DType dtype = DType::f32;
  Random random{1};
};

QKV_FOR_EACH_ISA(MicroKernelTest);

// C has every height up to three more rows than two micro-kernels have, and is up to three vectors
// wide. The depth goes through every remainder of the unrolled loops, and beyond kLongestChain.
TEST_P(MicroKernelTest, EveryShapeStrideAndBeta) {
  for (DType type : {DType::f32, DType::f64}) {
    dtype = type;
    const int64_t lanes = active_implementation().kernels(type).lanes;
    const int64_t step = active_parts(type).column_step;
    const int* const max_rows = active_parts(type).max_rows;
    const int64_t most = 2 * std::max(max_rows[0], max_rows[1]) + 3;
    for (int64_t rows = 1; rows <= most; rows += kQuick ? 5 : 1)
      for (int64_t cols = step; cols <= 3 * lanes; cols += step)
        for (int64_t depth : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 70})
          for (const Arrangement& pattern : arrangements(rows, depth)) {
            const int beta = int(draw(random, 0, 2));
            check(rows, cols, depth, pattern, beta);
            if (HasFailure()) return;
          }
    for (int beta : {0, 1, 2})
      for (const Arrangement& pattern : arrangements(7, 1000))
        check(7, 2 * lanes + step, 1000, pattern, beta);
  }
}

}  // namespace
}  // namespace qkv::test
