// qkv::indexed_attention against a mask that hides the same keys.
#include "common.h"
#include "qkv/indexed.h"

namespace qkv::test::indexed_tests {
namespace {

class Indexed : public testing::Test {
 protected:
  // Queries that have few keys between them, of many: what is read by blocks, or by pages.
  at::Tensor query = randn({2, 4, 5, 8}), key = randn({2, 2, 90, 8}), value = randn({2, 2, 90, 6});
  at::Tensor indices = at::randint(-1, 9, {2, 5, 3}, at::kLong) * 10;
  AttentionOptions options = AttentionOptions().enable_gqa(true).softcap(2.0);

  at::Tensor expected(const at::Tensor& chosen) {
    const at::Tensor mask = chosen.unsqueeze(-1).eq(at::arange(90)).any(-2).unsqueeze(1);
    return attention(query, key, value, AttentionOptions(options).attn_mask(mask));
  }
};

TEST_F(Indexed, IsAMask) {
  {
    const at::NoGradGuard by_pages;
    expect_close(std::get<0>(indexed_attention(query, key, value, indices, options)),
                 expected(indices), 1e-12);
  }
  const auto gradient = [&](const at::Tensor& result) {
    return torch::autograd::grad({result.sin().sum()}, {query, key, value}, {}, true);
  };
  const auto [output, lse] = indexed_attention(query, key, value, indices, options);
  expect_close(output, expected(indices), 1e-12);
  expect_close(gradient(output), gradient(expected(indices)), 1e-12);
}

TEST_F(Indexed, RefusesKeysThatAreNot) {
  EXPECT_THROW(indexed_attention(query, key, value, indices + 20, options), c10::Error);
  EXPECT_THROW(indexed_attention(query, key, value, indices.to(at::kDouble), options), c10::Error);
}

}  // namespace
}  // namespace qkv::test::indexed_tests
