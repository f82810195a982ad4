// The autograd Node of attention_with_lse, in every state in which backward() may find it.
#include "common.h"

namespace qkv::test::autograd_tests {
namespace {

constexpr double kTolerance = 1e-12;

class Autograd : public testing::Test {
 protected:
  at::Tensor query = randn({2, 3, 5, 8}), key = randn({2, 3, 7, 8}), value = randn({2, 3, 7, 4});
  at::Tensor output() const { return attention(query, key, value); }
  at::Tensor lse() const { return std::get<1>(attention_with_lse(query, key, value)); }
};

TEST_F(Autograd, BackwardFillsGrad) {
  output().sin().sum().backward();
  const auto [expected, _] = reference(query, key, value);
  const auto gradients = torch::autograd::grad({expected.sin().sum()}, {query, key, value});
  expect_close(query.grad(), gradients[0], kTolerance);
  expect_close(key.grad(), gradients[1], kTolerance);
  expect_close(value.grad(), gradients[2], kTolerance);
}

TEST_F(Autograd, OnlyLogsumexpIsUsed) {
  const auto expected = std::get<1>(reference(query, key, value)).sin().sum();
  const auto actual = torch::autograd::grad({lse().sin().sum()}, {query, key, value});
  const auto gradients = torch::autograd::grad({expected}, {query, key});
  expect_close(actual[0], gradients[0], kTolerance);
  expect_close(actual[1], gradients[1], kTolerance);
  EXPECT_TRUE(actual[2].eq(0).all().item<bool>());  // it does not depend on value
}

TEST_F(Autograd, OnlyWhatIsAskedForIsComputed) {
  const auto all = torch::autograd::grad({output().sin().sum()}, {query, key, value});
  const std::vector<at::Tensor> inputs = {query, key, value};
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto one = torch::autograd::grad({output().sin().sum()}, {inputs[i]});
    EXPECT_TRUE(at::equal(one[0], all[i]));
  }
  const auto frozen = attention(query, key.detach(), value.detach());
  frozen.sum().backward();
  EXPECT_TRUE(query.grad().defined());
  EXPECT_FALSE(key.grad().defined());
}

TEST_F(Autograd, RetainGraph) {
  const auto loss = output().sum();
  loss.backward({}, /*retain_graph=*/true);
  const auto once = query.grad().clone();
  loss.backward();
  expect_close(query.grad(), 2 * once, kTolerance);
  EXPECT_NE(message_of([&] { loss.backward(); }).find("second time"), std::string::npos);
}

TEST_F(Autograd, NoGraphWithoutGrad) {
  {
    torch::NoGradGuard guard;
    EXPECT_FALSE(output().requires_grad());
  }
  EXPECT_FALSE(attention(query.detach(), key.detach(), value.detach()).requires_grad());
  c10::InferenceMode guard;
  EXPECT_TRUE(output().is_inference());
}

TEST_F(Autograd, ChangedInputsAreNoticed) {
  const at::Tensor copy = key.clone();
  const auto result = attention(query, copy, value);
  copy.mul_(2);
  EXPECT_NE(message_of([&] { result.sum().backward(); }).find("modified by an inplace operation"),
            std::string::npos);
}

TEST_F(Autograd, SecondDerivatives) {
  const auto second = [&](const at::Tensor& result) {
    const auto first = torch::autograd::grad({result.sin().sum()}, {query}, {},
                                             /*retain_graph=*/true, /*create_graph=*/true)[0];
    return torch::autograd::grad({first.cos().sum()}, {query, key, value});
  };
  for (const double cap : {0., 2.}) {
    at::Tensor scores = query.matmul(key.transpose(-2, -1)) / std::sqrt(8.0);
    if (cap > 0) scores = cap * at::tanh(scores / cap);
    const auto expected = second(at::softmax(scores, -1).matmul(value));
    const auto actual = second(attention(query, key, value, AttentionOptions().softcap(cap)));
    for (size_t i = 0; i < expected.size(); ++i) expect_close(actual[i], expected[i], kTolerance);
  }
}

TEST_F(Autograd, SecondDerivativesOfHardAttentionAreRefused) {
  const auto [result, _] = hard_attention(query, key, value, {}, /*straight_through=*/true);
  const auto gradient =
      torch::autograd::grad({result.sin().sum()}, {query}, {}, true, /*create_graph=*/true)[0];
  std::string error;
  try {
    gradient.sum().backward();
  } catch (const std::exception& e) {
    error = e.what();
  }
  EXPECT_NE(error.find("second derivatives are not implemented yet"), std::string::npos) << error;
}

TEST_F(Autograd, GradientsAreLaidOutLikeTheirTensors) {
  const auto x = randn({2, 5, 3, 8}).transpose(1, 2);
  const auto result = attention(x, x, x);
  EXPECT_TRUE(result.transpose(1, 2).is_contiguous());
  EXPECT_EQ(torch::autograd::grad({result.sum()}, {x})[0].strides(), x.strides());
}

TEST_F(Autograd, ExpandedTensorsAreReadInPlace) {
  const auto one = randn({1, 1, 7, 8});
  const auto many = one.expand({2, 3, 7, 8});
  const auto [expected, _] = reference(query, many, many);
  const auto actual = attention(query, many, many);
  expect_close(actual, expected, kTolerance);
  expect_close(torch::autograd::grad({actual.sin().sum()}, {one})[0],
               torch::autograd::grad({expected.sin().sum()}, {one})[0], kTolerance);
}

}  // namespace
}  // namespace qkv::test::autograd_tests
