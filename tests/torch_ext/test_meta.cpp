// The Meta kernels agree with the CPU kernels on shapes, strides and errors.
#include "common.h"

namespace qkv::test::meta_tests {
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

// Holds run(tensors...) on meta against run(tensors...) on the CPU: its results and gradients.
template <class Run>
void expect_same_results(const std::vector<at::Tensor>& inputs, const Run& run) {
  std::vector<at::Tensor> meta;
  for (const at::Tensor& x : inputs) {
    meta.push_back(like_meta(x));
    if (x.requires_grad()) meta.back().requires_grad_();
  }
  const std::vector<at::Tensor> actual = run(meta), expected = run(inputs);
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    SCOPED_TRACE(i);
    expect_same_layout(actual[i], expected[i]);
  }
  const auto gradients = [](const std::vector<at::Tensor>& results,
                            const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> outputs, grads, wanted;
    for (const at::Tensor& x : results)
      if (x.requires_grad()) outputs.push_back(x), grads.push_back(at::ones_like(x));
    for (const at::Tensor& x : tensors)
      if (x.requires_grad()) wanted.push_back(x);
    return torch::autograd::grad(outputs, wanted, grads);
  };
  const auto meta_gradients = gradients(actual, meta);
  const auto cpu_gradients = gradients(expected, inputs);
  for (size_t i = 0; i < cpu_gradients.size(); ++i) {
    SCOPED_TRACE(i);
    expect_same_layout(meta_gradients[i], cpu_gradients[i]);
  }
}

TEST(Meta, AttentionWithEveryOption) {
  const auto mask = at::randn({7, 6}).t().requires_grad_();
  expect_same_results({randn({2, 4, 6, 8}), randn({2, 2, 7, 8}), randn({2, 2, 7, 5}),
                       mask.to(at::kDouble), randn({4}, at::kHalf), randn({2, 1})},
                      [](const std::vector<at::Tensor>& x) {
                        const auto options = AttentionOptions()
                                                 .attn_mask(x[3])
                                                 .dropout_p(0.5)
                                                 .enable_gqa(true)
                                                 .window_size({{3, 1}})
                                                 .softcap(2)
                                                 .alibi_slopes(x[4])
                                                 .sinks(x[5]);
                        const auto [output, lse] = attention_with_lse(x[0], x[1], x[2], options);
                        return std::vector<at::Tensor>{output, lse};
                      });
}

TEST(Meta, HalfPrecision) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const auto all = [&](const std::vector<at::Tensor>& x) {
      const auto options = AttentionOptions().attn_mask(x[3]).sinks(x[4]);
      const auto [output, lse] = attention_with_lse(x[0], x[1], x[2], options);
      const auto weights = attention_weights(x[0], x[1], options, "heads");
      return std::vector<at::Tensor>{output, lse, weights};
    };
    const auto half = [&](at::IntArrayRef shape) { return randn(shape, dtype); };
    const auto query = half({2, 6, 4, 8}).transpose(1, 2), key = half({4, 7, 8});
    for (const auto& mask : {half({6, 7}), half({4, 1, 7}), half({6, 1}), randn({7}, at::kFloat)})
      expect_same_results({query, key, half({2, 1, 7, 5}), mask, half({4})}, all);
  }
}

// The gradients of such masks are sums that need no more reducing, but lie in another order.
TEST(Meta, TransposedMasksOfOneRowOrColumn) {
  const std::vector<std::pair<std::vector<int64_t>, std::vector<int64_t>>> masks = {
      {{6, 4, 1}, {1, 0, 2}}, {{7, 1, 4}, {2, 1, 0}}};
  for (const auto& [shape, order] : masks)
    expect_same_results(
        {randn({4, 6, 8}), randn({4, 7, 8}), randn(shape).detach().permute(order).requires_grad_()},
        [](const std::vector<at::Tensor>& x) {
          return std::vector<at::Tensor>{
              attention(x[0], x[1], x[1], AttentionOptions().attn_mask(x[2]))};
        });
}

TEST(Meta, VarlenAttention) {
  expect_same_results({randn({6, 4, 8}), randn({9, 4, 8}), randn({9, 4, 5}), at::tensor({0, 2, 6}),
                       at::tensor({0, 5, 9}), at::tensor({4, 4})},
                      [](const std::vector<at::Tensor>& x) {
                        const auto [output, lse] =
                            varlen_attention(x[0], x[1], x[2], x[3], x[4], {}, x[5]);
                        return std::vector<at::Tensor>{output, lse};
                      });
}

TEST(Meta, AttentionWeights) {
  for (const std::optional<std::string_view> reduce :
       std::initializer_list<std::optional<std::string_view>>{std::nullopt, "heads", "queries"}) {
    expect_same_results(
        {randn({2, 4, 6, 8}), randn({2, 4, 7, 8}), randn({6, 7}), randn({4})},
        [&](const std::vector<at::Tensor>& x) {
          const auto options = AttentionOptions().attn_mask(x[2]).sinks(x[3]);
          return std::vector<at::Tensor>{attention_weights(x[0], x[1], options, reduce)};
        });
  }
}

TEST(Meta, HardAttention) {
  expect_same_results({randn({2, 6, 4, 8}).transpose(1, 2), randn({2, 4, 7, 8}),
                       randn({2, 4, 7, 5}), randn({6, 7})},
                      [](const std::vector<at::Tensor>& x) {
                        const auto [output, index] = hard_attention(
                            x[0], x[1], x[2], AttentionOptions().attn_mask(x[3]), true);
                        return std::vector<at::Tensor>{output, index};
                      });
}

TEST(Meta, ErrorsAgree) {
  const auto q = at::randn({2, 5, 4}), k = at::randn({2, 6, 3});
  EXPECT_EQ(message_of([&] { attention(like_meta(q), like_meta(k), like_meta(k)); }),
            message_of([&] { attention(q, k, k); }));
  const auto sinks = [&](const at::Tensor& x, const at::Tensor& bad) {
    return message_of([&] { attention(x, x, x, AttentionOptions().sinks(bad)); });
  };
  const auto bad = at::ones({3});
  EXPECT_EQ(sinks(like_meta(q), like_meta(bad)), sinks(q, bad));
  const auto packed = [&](const at::Tensor& x, const at::Tensor& ends, const at::Tensor& other) {
    return message_of([&] { varlen_attention(x, x, x, ends, other); });
  };
  const auto ends = at::tensor({0, 2}), other = at::tensor({0, 1, 2});
  EXPECT_EQ(packed(like_meta(q), like_meta(ends), like_meta(other)), packed(q, ends, other));
}

}  // namespace
}  // namespace qkv::test::meta_tests
