// qkv::nn::MultiheadAttention against torch::nn::MultiheadAttention, with the same parameters.
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/any.h>
#include <torch/serialize.h>

#include <sstream>

#include "common.h"
#include "qkv/nn.h"

namespace qkv::test::nn_tests {
namespace {

using torch::nn::MultiheadAttentionOptions;

constexpr double kTolerance = 1e-11;  // of gradients that are sums of some hundred products
constexpr int64_t B = 2, H = 4, L = 5, S = 7, E = 12;

// Parameters are drawn, as torch's biases begin as 0, and copied by name. They are of the size that
// torch gives them: larger ones would saturate the softmax, and rounding errors would show.
template <class From, class To>
void copy_parameters(const From& from, const To& to) {
  torch::NoGradGuard guard;
  for (const auto& parameter : from->named_parameters()) parameter.value().normal_(0, 0.3);
  const auto its = to->named_parameters();
  ASSERT_EQ(its.keys(), from->named_parameters().keys());
  for (const auto& parameter : from->named_parameters())
    its[parameter.key()].copy_(parameter.value());
}

struct Case {
  std::string name;
  MultiheadAttentionOptions options = MultiheadAttentionOptions(E, H);
  bool pads = false, masks = false, is_self = false;
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

std::vector<Case> cases() {
  const auto options = [] { return MultiheadAttentionOptions(E, H); };
  return {
      {"plain"},
      {"self", options(), true, false, true},
      {"masks", options(), true, true},
      {"no_bias", options().bias(false)},
      {"more_keys", options().add_bias_kv(true).add_zero_attn(true), true, true},
      {"widths", options().kdim(6).vdim(6)},
      {"widths_no_bias", options().kdim(6).vdim(6).bias(false), true},
  };
}

class Layer : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    torchs->to(torch::kDouble);
    ours->to(torch::kDouble);
    copy_parameters(torchs, ours);
  }

  // Output, weights and the gradients of inputs and parameters.
  template <class Module>
  std::vector<at::Tensor> results(Module& layer, bool average) {
    auto [output, weights] = layer(query, key, value, padding, true, mask, average);
    std::vector<at::Tensor> all = {output, weights}, leaves = layer->parameters();
    leaves.push_back(query);
    if (!c.is_self) leaves.insert(leaves.end(), {key, value});
    const auto grads = torch::autograd::grad({output.sin().sum() + weights.sin().sum()}, leaves);
    all.insert(all.end(), grads.begin(), grads.end());
    return all;
  }

  const Case& c = GetParam();
  torch::nn::MultiheadAttention torchs{c.options};
  nn::MultiheadAttention ours{c.options};
  int64_t width = c.options.kdim();
  at::Tensor query = randn({L, B, E});
  at::Tensor key = c.is_self ? query : randn({S, B, width});
  at::Tensor value = c.is_self ? query : randn({S, B, width});
  at::Tensor mask = c.masks ? randn({L, S}) : at::Tensor();
  at::Tensor padding =
      c.pads ? at::arange(c.is_self ? L : S) >= at::tensor({4, 2}).unsqueeze(1) : at::Tensor();
};

TEST_P(Layer, ComputesWhatTorchDoes) {
  for (bool average : {true, false})
    expect_close(results(ours, average), results(torchs, average), kTolerance);
}

// A module whose type is not known takes defaults that stand beside the signature.
TEST_P(Layer, InAnAnyModuleHasTorchsDefaults) {
  using Result = std::tuple<at::Tensor, at::Tensor>;
  torch::nn::AnyModule any(ours), expected(torchs);
  const auto [output, weights] = any.forward<Result>(query, key, value);
  const auto [its_output, its_weights] = expected.forward<Result>(query, key, value);
  expect_close(output, its_output, kTolerance);
  expect_close(weights, its_weights, kTolerance);
}

TEST_P(Layer, WithoutWeightsTheOutputIsTheSame) {
  const auto [with, weights] = ours(query, key, value, padding, true, mask);
  const auto [without, none] = ours(query, key, value, padding, false, mask);
  EXPECT_FALSE(none.defined());
  expect_close(without, with, kTolerance);
}

TEST_P(Layer, ArchivesLoadIntoEitherClass) {
  std::stringstream archive, back;
  torch::save(torchs, archive);
  nn::MultiheadAttention loaded(c.options);
  loaded->to(torch::kDouble);
  torch::load(loaded, archive);
  torch::save(loaded, back);
  torch::nn::MultiheadAttention returned(c.options);
  returned->to(torch::kDouble);
  torch::load(returned, back);
  const auto expected = torchs->named_parameters(), actual = returned->named_parameters();
  ASSERT_EQ(actual.keys(), expected.keys());
  for (const auto& parameter : expected)
    EXPECT_TRUE(at::equal(actual[parameter.key()], parameter.value())) << parameter.key();
}

TEST_P(Layer, AClonesParametersAreItsOwn) {
  const auto clone = std::dynamic_pointer_cast<nn::MultiheadAttentionImpl>(ours->clone());
  ASSERT_TRUE(clone);
  nn::MultiheadAttention cloned(clone);
  const auto expected = std::get<0>(ours(query, key, value, padding, false, mask));
  EXPECT_TRUE(at::equal(std::get<0>(cloned(query, key, value, padding, false, mask)), expected));
  torch::NoGradGuard guard;
  for (auto& parameter : clone->parameters()) parameter.zero_();
  EXPECT_TRUE(at::equal(std::get<0>(ours(query, key, value, padding, false, mask)), expected));
}

INSTANTIATE_TEST_SUITE_P(Nn, Layer, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

struct SelfAttention : testing::Test {
  at::Tensor x = randn({L, B, E});
  nn::MultiheadAttention layer = make(AttentionOptions());

  static nn::MultiheadAttention make(const AttentionOptions& scores, double dropout = 0) {
    torch::manual_seed(0);
    nn::MultiheadAttention layer(MultiheadAttentionOptions(E, H).dropout(dropout), scores);
    layer->to(torch::kDouble);
    return layer;
  }
  at::Tensor output(nn::MultiheadAttention& layer, const at::Tensor& padding = {},
                    const at::Tensor& mask = {}) const {
    return std::get<0>(layer(x, x, x, padding, false, mask));
  }
};

TEST_F(SelfAttention, BooleanMasksHide) {
  const at::Tensor hidden = at::ones({L, L}, at::kBool).triu(1);
  const at::Tensor added = at::zeros({L, L}, at::kDouble).masked_fill(hidden, -INFINITY);
  const at::Tensor expected = output(layer, {}, added);
  expect_close(output(layer, {}, hidden), expected, kTolerance);
  expect_close(output(layer, {}, hidden.expand({B * H, L, L})), expected, kTolerance);
  auto causal = make(AttentionOptions().is_causal(true));
  expect_close(output(causal), expected, kTolerance);
  auto unused = make(AttentionOptions().attn_mask(hidden));
  expect_close(output(unused), output(layer), 0);
}

TEST_F(SelfAttention, MasksOfEitherKindGoTogether) {
  const at::Tensor padding = at::arange(L).expand({B, L}) >= 3;
  const at::Tensor bias = randn({H, 1, L}), mask = randn({L, L});
  const at::Tensor far = at::zeros({B, L}, at::kDouble).masked_fill(padding, -INFINITY);
  const at::Tensor expected = output(layer, padding, mask);
  expect_close(output(layer, far, mask), expected, kTolerance);
  auto biased = make(AttentionOptions().bias(bias));
  const at::Tensor all = (mask + bias).expand({B, H, L, L}).flatten(0, 1);
  expect_close(output(biased, padding, mask), output(layer, padding, all), kTolerance);
  const at::Tensor single = mask.to(at::kFloat), other = randn({B, L}).to(at::kFloat);
  expect_close(output(biased, other, single),
               output(biased, other.to(at::kDouble), single.to(at::kDouble)), kTolerance);
}

TEST_F(SelfAttention, ARowThatSeesNothingGetsTheBias) {
  auto [result, weights] = layer(x, x, x, at::ones({B, L}, at::kBool));
  EXPECT_TRUE(at::equal(result, layer->out_proj->bias.expand_as(result)));
  EXPECT_EQ(weights.abs().max().item<double>(), 0);
}

TEST_F(SelfAttention, WeightsAreThoseAfterDropout) {
  auto drops = make(AttentionOptions(), 0.5);
  const auto [result, weights] = drops(x, x, x, at::Tensor(), true, at::Tensor(), false);
  EXPECT_GT(weights.eq(0).sum().item<int64_t>(), 0);
  const at::Tensor value =
      at::linear(x, drops->in_proj_weight.slice(0, 2 * E), drops->in_proj_bias.slice(0, 2 * E));
  const at::Tensor heads = value.unflatten(-1, {H, E / H}).permute({1, 2, 0, 3});
  const at::Tensor mixed = at::matmul(weights, heads).permute({2, 0, 1, 3}).flatten(2);
  expect_close(result, drops->out_proj(mixed), kTolerance);
  drops->eval();
  expect_close(output(drops), output(layer), kTolerance);
}

TEST_F(SelfAttention, ErrorsNameTheArgument) {
  EXPECT_EQ(message_of<c10::ValueError>([] { nn::MultiheadAttention(E, 0); }),
            "MultiheadAttention: embed_dim is 12 and num_heads 0, but 1 or more is expected");
  EXPECT_EQ(message_of([&] { layer(x, x.slice(2, 0, 8), x); }),
            "MultiheadAttention: key is [5, 2, 8], but [S, 2, 12] is expected");
  EXPECT_EQ(message_of([&] { layer(x, x, x.slice(0, 0, 3)); }),
            "MultiheadAttention: value is [3, 2, 12], but [5, 2, 12] is expected");
  EXPECT_EQ(message_of([&] { layer(x, x, at::Tensor()); }),
            "MultiheadAttention: value is an undefined tensor");
  EXPECT_EQ(message_of([&] { output(layer, at::ones({B, 3}, at::kBool)); }),
            "MultiheadAttention: key_padding_mask is [2, 3], but [2, 5] is expected");
  EXPECT_EQ(message_of([&] { output(layer, {}, at::ones({L, 3})); }),
            "MultiheadAttention: attn_mask is [5, 3], but [5, 5] or [8, 5, 5] is expected");
  EXPECT_EQ(
      message_of([&] { output(layer, {}, at::ones({L, L}, at::kLong)); }),
      "MultiheadAttention: attn_mask is Long, but Bool (true = hidden), Float or the dtype of "
      "the projected query, Double, is expected");
  EXPECT_EQ(message_of([&] { output(layer, at::zeros({B, L}, at::kHalf)); }),
            "MultiheadAttention: key_padding_mask is Half, but Bool (true = hidden), Float or the "
            "dtype of the projected query, Double, is expected");
  const auto more = torch::nn::MultiheadAttentionOptions(E, H).add_zero_attn(true);
  const auto causal = AttentionOptions().is_causal(true);
  EXPECT_EQ(
      message_of<c10::ValueError>([&] { nn::MultiheadAttention(more, causal); }),
      "MultiheadAttention: scores has is_causal, window_size, spans or alibi_slopes, but none "
      "of these is expected with add_bias_kv or add_zero_attn, whose keys are behind all "
      "others; pass an attn_mask");
  const auto undefined = AttentionOptions().spans(at::Tensor()).alibi_slopes(at::Tensor());
  EXPECT_NO_THROW(nn::MultiheadAttention(more, undefined));
}

}  // namespace
}  // namespace qkv::test::nn_tests
