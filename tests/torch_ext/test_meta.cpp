// The Meta kernels agree with the CPU kernels on shapes, strides and errors.
#include "common.h"

namespace qkv::test {
namespace {

at::Tensor like_meta(const at::Tensor& t) {
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
}

void expect_same_layout(const at::Tensor& meta, const at::Tensor& cpu) {
  EXPECT_TRUE(meta.is_meta());
  EXPECT_EQ(meta.sizes(), cpu.sizes());
  EXPECT_EQ(meta.strides(), cpu.strides());
  EXPECT_EQ(meta.scalar_type(), cpu.scalar_type());
}

TEST(Meta, LayoutsAgreeForEveryOrderOfDimensions) {
  const std::vector<int64_t> shape = {2, 3, 5, 4};
  std::vector<int64_t> order = {0, 1, 2, 3}, inverse(4);
  do {
    std::vector<int64_t> permuted;
    for (int i = 0; i < 4; ++i) {
      permuted.push_back(shape[order[i]]);
      inverse[order[i]] = i;
    }
    const auto x = at::randn(permuted).permute(inverse).requires_grad_();
    const auto m = like_meta(x).requires_grad_();
    const auto [output, lse] = attention_with_lse(x, x, x);
    const auto [meta_output, meta_lse] = attention_with_lse(m, m, m);
    expect_same_layout(meta_output, output);
    expect_same_layout(meta_lse, lse);
    const auto gradient = torch::autograd::grad({output}, {x}, {at::ones_like(output)});
    const auto meta_gradient =
        torch::autograd::grad({meta_output}, {m}, {at::ones_like(meta_output)});
    expect_same_layout(meta_gradient[0], gradient[0]);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(Meta, ErrorsAgree) {
  const auto q = at::randn({2, 5, 4}), k = at::randn({2, 6, 3});
  EXPECT_EQ(message_of([&] { attention(like_meta(q), like_meta(k), like_meta(k)); }),
            message_of([&] { attention(q, k, k); }));
}

}  // namespace
}  // namespace qkv::test
