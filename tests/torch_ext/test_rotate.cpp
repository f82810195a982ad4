// qkv::rotate against the formula, with gradients.
#include "qkv/rotate.h"

#include "common.h"

namespace qkv::test::rotate_tests {
namespace {

at::Tensor rotated(at::Tensor x, const at::Tensor& cos, const at::Tensor& sin,
                   const std::optional<at::Tensor>& weight) {
  if (weight) x = x * (x * x).mean(-1, true).add(1e-6).rsqrt() * *weight;
  const int64_t pairs = cos.size(-1);
  const at::Tensor a = x.narrow(-1, 0, pairs), b = x.narrow(-1, pairs, pairs);
  return at::cat({a * cos - b * sin, b * cos + a * sin, x.slice(-1, 2 * pairs)}, -1);
}

TEST(Rotate, WithGradients) {
  const at::Tensor query = randn({2, 3, 5, 8}), key = randn({2, 1, 5, 8});
  const at::Tensor cos = randn({5, 3}), sin = randn({5, 3}), weight = randn({8});
  const auto [q, k] = rotate(query, key, cos, sin, RotateOptions().key_weight(weight));
  const at::Tensor expected_q = rotated(query, cos, sin, std::nullopt);
  const at::Tensor expected_k = rotated(key, cos, sin, weight);
  expect_close(q, expected_q, 1e-12);
  expect_close(k, expected_k, 1e-12);
  const auto gradients = [&](const at::Tensor& a, const at::Tensor& b) {
    return torch::autograd::grad({a.sin().sum() + b.cos().sum()}, {query, key, cos, sin, weight});
  };
  expect_close(gradients(q, k), gradients(expected_q, expected_k), 1e-11);
}

TEST(Rotate, NamesWhatIsWrong) {
  const at::Tensor x = at::zeros({1, 2, 3, 4});
  const at::Tensor cos = at::zeros({3, 2}), sin = at::zeros({3, 1});
  EXPECT_EQ(message_of([&] { rotate(x, x, cos, sin); }),
            "rotate: sin has the shape [3, 1], but that of cos is expected, [3, 2]");
  EXPECT_EQ(message_of([&] { rotate(x, x, cos, cos, RotateOptions().query_weight(sin)); }),
            "rotate: query_weight has the shape [3, 1], but [..., D] = [1, 4] or its last "
            "dimension is expected");
}

}  // namespace
}  // namespace qkv::test::rotate_tests
