// qkv::latent_attention against the attention to keys and values that are written out.
#include "qkv/latent.h"

#include "common.h"

namespace qkv::test::latent_tests {
namespace {

constexpr double kTolerance = 1e-12;

class Latent : public testing::Test {
 protected:
  // H = 3, L = 4, S = 9, N = 6, R = 4, C = 8, Dv = 5.
  const at::Tensor nope = randn({2, 3, 4, 6}), rope = randn({2, 3, 4, 4});
  const at::Tensor latents = randn({2, 1, 9, 8}), rope_keys = randn({2, 1, 9, 4});
  const at::Tensor key_weight = randn({3, 6, 8}), value_weight = randn({3, 5, 8});
  const std::vector<at::Tensor> inputs = {nope, rope, latents, rope_keys, key_weight, value_weight};

  std::tuple<at::Tensor, at::Tensor> expected(const AttentionOptions& options) const {
    const at::Tensor key =
        at::cat({latents.matmul(key_weight.mT()), rope_keys.expand({-1, 3, -1, -1})}, -1);
    return reference(at::cat({nope, rope}, -1), key, latents.matmul(value_weight.mT()), options);
  }
};

TEST_F(Latent, BothWaysWithGradients) {
  const auto options = AttentionOptions().window_size({{5, 0}}).softcap(2);
  const auto [output, lse] = expected(options);
  const auto gradients = torch::autograd::grad({output.sin().sum() + lse.sum()}, inputs);
  for (const std::optional<bool> absorb : {std::optional<bool>(), {true}, {false}}) {
    const auto [o, l] =
        latent_attention(nope, rope, latents, rope_keys, key_weight, value_weight, options, absorb);
    expect_close(o, output, kTolerance);
    expect_close(l, lse, kTolerance);
    expect_close(torch::autograd::grad({o.sin().sum() + l.sum()}, inputs), gradients, 1e-10);
    const auto rows = at::cat({latents, rope_keys}, -1);
    const auto [whole, _] =
        latent_attention(nope, rope, rows, std::nullopt, key_weight, value_weight, options, absorb);
    expect_close(whole, output, kTolerance);
  }
}

TEST_F(Latent, CacheOfRows) {
  const at::NoGradGuard guard;
  const at::Tensor rows = at::cat({latents, rope_keys}, -1);
  const auto [output, lse] = expected(AttentionOptions().window_size({{-1, 0}}));
  for (const bool absorb : {true, false}) {
    const at::Tensor cache = at::zeros({2, 1, 12, 12}, at::kDouble);
    cache.slice(2, 0, 5).copy_(rows.slice(2, 0, 5));
    const auto options = KvCacheOptions().cache_seqlens(at::full({2}, 5, at::kInt)).causal(true);
    const auto [o, l] =
        latent_attention_with_kvcache(nope, rope, cache, key_weight, value_weight,
                                      latents.slice(2, 5), rope_keys.slice(2, 5), options, absorb);
    expect_close(o, output, kTolerance);
    expect_close(l, lse, kTolerance);
    EXPECT_TRUE(at::equal(cache.slice(2, 0, 9), rows));
    EXPECT_EQ(cache.slice(2, 9).abs().max().item<double>(), 0);
  }
}

template <class F>
std::string error_of(const F& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.msg();
  }
  return "no error";
}

TEST_F(Latent, NamesWhatIsWrong) {
  EXPECT_EQ(error_of([&] {
              latent_attention({}, rope, latents, std::nullopt, key_weight, value_weight);
            }),
            "latent_attention: query_nope is an undefined tensor");
  EXPECT_EQ(error_of([&] {
              latent_attention(nope, rope, latents, std::nullopt, key_weight, value_weight);
            }),
            "latent_attention: latents has the shape [2, 1, 9, 8], but [..., 1, S, C + R] = [2, 1, "
            "9, 12] is expected");
  EXPECT_EQ(error_of([&] {
              latent_attention_with_kvcache(nope, rope, at::zeros({2, 1, 9, 12}, at::kDouble),
                                            key_weight, value_weight, std::nullopt, std::nullopt,
                                            KvCacheOptions().v_scale(at::ones({1})));
            }),
            "latent_attention_with_kvcache: v_scale is given, but values are a part of the rows, "
            "whose scale is k_scale");
  EXPECT_EQ(error_of([&] {
              latent_attention_with_kvcache(nope, rope, at::zeros({2, 1, 9, 12}, at::kDouble),
                                            key_weight, value_weight, std::nullopt, std::nullopt,
                                            KvCacheOptions().rotary_cos(at::ones({9, 2})));
            }),
            "latent_attention_with_kvcache: rotary_cos or rotary_sin is given, but nullopt is "
            "expected: query_rope and rope_keys are rotated already");
}

}  // namespace
}  // namespace qkv::test::latent_tests
