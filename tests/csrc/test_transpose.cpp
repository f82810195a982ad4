// The transposition of whole vectors, which changes no bit.
#include <gtest/gtest.h>

#include "cases.h"
#include "dispatch/kernel_table.h"
#include "parts/kernel_parts.h"

namespace qkv::test {
namespace {

class TransposeTest : public IsaTest {};

QKV_FOR_EACH_ISA(TransposeTest);

TEST_P(TransposeTest, EverySize) {
  for (DType dtype : {DType::f32, DType::f64}) {
    const Kernels& kernels = active_implementation().kernels(dtype);
    for (int64_t rows = kernels.lanes; rows <= 4 * kernels.lanes; rows += kernels.lanes) {
      for (int64_t cols = kernels.lanes; cols <= 4 * kernels.lanes; cols += kernels.lanes) {
        for (int64_t gap : {0, 1, 7}) {
          SCOPED_TRACE(::testing::Message() << rows << " x " << cols << " gap " << gap);
          Tensor in(type_of(dtype), {1, rows, cols}, {0, cols + gap, 1});
          Tensor out(type_of(dtype), {1, cols, rows}, {0, rows + gap, 1}, gap == 7);
          int number = 0;
          in.fill([&] { return ++number; });
          in.make_read_only();
          active_parts(dtype).transpose(in.data(), cols + gap, out.data(), rows + gap, rows, cols);
          EXPECT_TRUE(out.canaries_alive()) << "something beside the output was written";
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t c = 0; c < cols; ++c)
              ASSERT_EQ(out.get({0, c, r}), in.get({0, r, c})) << r << ", " << c;
        }
      }
    }
  }
}

}  // namespace
}  // namespace qkv::test
