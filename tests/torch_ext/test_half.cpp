// bfloat16 and float16 against the formula in float64 on the same rounded numbers.
#include "common.h"

namespace qkv::test::half_tests {
namespace {

// The distance of 1 to the next number.
double epsilon(at::ScalarType dtype) { return dtype == at::kHalf ? 0x1p-10 : 0x1p-7; }

// Every element is as close as rounding it once allows, with a hundredth more, since sums in
// float32 may decide between two numbers that are almost equally near.
void expect_rounded_once(const at::Tensor& actual, const at::Tensor& truth) {
  ASSERT_EQ(actual.sizes(), truth.sizes());
  const auto exact = truth.detach().to(at::kDouble);
  const auto error = (actual.detach().to(at::kDouble) - exact).abs();
  // 2^-24: half of float16's smallest number.
  const auto bound = exact.abs() * (epsilon(actual.scalar_type()) / 2 * 1.01) + 0x1p-24;
  EXPECT_TRUE(error.le(bound).all().item<bool>()) << "worst " << (error / bound).max();
}

// Every element is within `units` roundings of the largest element, or of `size`, the order of the
// numbers that may cancel to nothing.
void expect_near(const at::Tensor& actual, const at::Tensor& truth, double units,
                 double size = 0.5) {
  ASSERT_EQ(actual.sizes(), truth.sizes());
  const auto exact = truth.detach().to(at::kDouble);
  const double error = (actual.detach().to(at::kDouble) - exact).abs().max().item<double>();
  const double largest = std::max(exact.abs().max().item<double>(), size);
  const double unit = epsilon(actual.scalar_type()) / 2 * largest;
  EXPECT_LE(error, units * unit) << error / unit << " roundings";
}

// The same numbers in float64, as a leaf of autograd.
at::Tensor in_double(const at::Tensor& tensor) {
  const auto copy = tensor.detach().to(at::kDouble);
  return copy.requires_grad_(tensor.requires_grad());
}

AttentionOptions in_double(AttentionOptions options) {
  if (options.attn_mask() && options.attn_mask()->is_floating_point())
    options.attn_mask(in_double(*options.attn_mask()));
  if (options.alibi_slopes()) options.alibi_slopes(in_double(*options.alibi_slopes()));
  if (options.sinks()) options.sinks(in_double(*options.sinks()));
  return options;
}

struct Case {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> query, key, value;
  AttentionOptions options;
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

std::vector<Case> cases_of(at::ScalarType dtype) {
  const auto options = [] { return AttentionOptions(); };
  at::Tensor keep = at::randn({40, 70}).gt(-0.5);
  keep.select(1, 0).fill_(true);
  const std::vector<int64_t> q = {2, 4, 40, 16}, k = {2, 4, 70, 16}, v = {2, 4, 70, 8};
  return {
      {"plain", dtype, q, k, k, options()},
      {"one_query", dtype, {2, 4, 1, 16}, k, v, options()},
      {"broadcast", dtype, {4, 40, 16}, {2, 1, 70, 16}, v, options()},
      {"gqa", dtype, q, {2, 2, 70, 16}, {2, 2, 70, 16}, options().enable_gqa(true)},
      {"gqa_unequal", dtype, q, {2, 2, 70, 16}, {2, 1, 70, 8}, options().enable_gqa(true)},
      {"bool_mask", dtype, q, k, v, options().attn_mask(keep).is_causal(true)},
      {"own_mask", dtype, q, k, v, options().attn_mask(randn({2, 1, 40, 70}, dtype))},
      {"own_keys_mask", dtype, q, k, v, options().attn_mask(randn({4, 1, 70}, dtype))},
      {"own_queries_mask", dtype, q, k, v, options().attn_mask(randn({40, 1}, dtype))},
      {"float32_mask", dtype, q, k, v, options().attn_mask(randn({4, 40, 70}, at::kFloat))},
      {"everything",
       dtype,
       q,
       {2, 2, 70, 16},
       {2, 2, 70, 8},
       options()
           .enable_gqa(true)
           .attn_mask(randn({4, 40, 70}, dtype))
           .window_size({{30, 9}})
           .softcap(3)
           .alibi_slopes(randn({4}, at::kFloat))
           .sinks(randn({2, 4}, dtype))
           .scale(0.4)},
  };
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto dtype : {at::kBFloat16, at::kHalf})
    for (Case& c : cases_of(dtype)) {
      c.name += dtype == at::kHalf ? "_f16" : "_bf16";
      all.push_back(c);
    }
  return all;
}

class Half : public testing::TestWithParam<Case> {
 protected:
  const Case& c = GetParam();
  at::Tensor query = randn(c.query, c.dtype), key = randn(c.key, c.dtype),
             value = randn(c.value, c.dtype);
  const at::Tensor query64 = in_double(query), key64 = in_double(key), value64 = in_double(value);
  const AttentionOptions options64 = in_double(c.options);

  // Expects gradients of `inputs` in their dtypes, and near those of `inputs64`.
  void expect_gradients(const std::vector<at::Tensor>& results,
                        const std::vector<at::Tensor>& inputs,
                        const std::vector<at::Tensor>& results64,
                        const std::vector<at::Tensor>& inputs64) {
    std::vector<at::Tensor> grads, grads64;
    for (const at::Tensor& result : results) {
      grads.push_back(at::randn(result.sizes(), result.options()));
      grads64.push_back(grads.back().to(at::kDouble));
    }
    const auto actual = torch::autograd::grad(results, inputs, grads);
    const auto truth = torch::autograd::grad(results64, inputs64, grads64, /*retain_graph=*/true);
    for (size_t i = 0; i < actual.size(); ++i) {
      SCOPED_TRACE(i);
      EXPECT_EQ(actual[i].scalar_type(), inputs[i].scalar_type());
      // Gradients in float32, too, are sums of terms that were rounded. One ulp of all the terms is
      // two roundings.
      const double terms = cancelling_terms(inputs[i], inputs, truth);
      expect_near(actual[i].to(c.dtype), truth[i], terms > 0 ? 2 : 6, std::max(terms, 0.5));
    }
  }

 private:
  // The sum of the sizes of all terms of an element of the gradient of `input`, if most of the sum
  // cancels; else 0.
  double cancelling_terms(const at::Tensor& input, const std::vector<at::Tensor>& inputs,
                          const std::vector<at::Tensor>& truth) const {
    const auto is = [](const at::Tensor& tensor, const std::optional<at::Tensor>& option) {
      return option && tensor.is_same(*option);
    };
    if (is(input, c.options.alibi_slopes()) || is(input, c.options.sinks())) {
      const auto mask = std::find_if(inputs.begin(), inputs.end(), [&](const at::Tensor& tensor) {
        return is(tensor, c.options.attn_mask());
      });
      TORCH_CHECK(mask != inputs.end(), "no mask to read the gradient of the scores from");
      return terms_of_scores(truth[mask - inputs.begin()], is(input, c.options.alibi_slopes()));
    }
    // The gradients of all scores of a row add up to 0 exactly, and are weights times numbers of
    // order 1. A mask of one column gets this sum from every batch item and head.
    const bool of_rows = is(input, c.options.attn_mask()) && input.size(-1) == 1;
    return of_rows ? double(query.numel() / (query.size(-1) * query.size(-2))) : 0;
  }

  // The gradients of slopes and sinks have a term for every score of a head. For slopes it is the
  // gradient of the score, which is that of the mask's element, times the distance of its key. For
  // sinks it is that gradient with the other sign: the weights of sink and keys add up to 1.
  static double terms_of_scores(const at::Tensor& grad_mask, bool slopes) {
    const int64_t L = grad_mask.size(-2), S = grad_mask.size(-1);
    const auto distance = (at::arange(L).unsqueeze(1) + (S - L) - at::arange(S)).abs();
    const auto terms = slopes ? grad_mask * distance : grad_mask;
    return terms.abs().sum({-2, -1}).max().item<double>();
  }
};

TEST_P(Half, AttentionWithLse) {
  const auto [output, lse] = attention_with_lse(query, key, value, c.options);
  const auto [output64, lse64] = reference(query64, key64, value64, options64);
  EXPECT_EQ(output.scalar_type(), c.dtype);
  EXPECT_EQ(lse.scalar_type(), at::kFloat);
  expect_near(output, output64, 3);
  EXPECT_TRUE(at::allclose(lse.to(at::kDouble), lse64, 1e-5, 1e-5));
  expect_gradients({output, lse}, leaves({query, key, value}, c.options), {output64, lse64},
                   leaves({query64, key64, value64}, options64));
}

TEST_P(Half, AttentionWeights) {
  const auto weights64 = reference_weights(query64, key64, options64);
  const bool batched = weights64.dim() > 2;
  for (const std::string reduce : {"", "heads", "queries"}) {
    SCOPED_TRACE(reduce);
    const auto weights =
        attention_weights(query, key, c.options,
                          reduce.empty() ? std::nullopt : std::optional<std::string_view>(reduce));
    const auto truth = reduce.empty()        ? weights64
                       : reduce == "queries" ? weights64.sum(-2)
                       : batched             ? weights64.mean(-3)
                                             : weights64;
    EXPECT_EQ(weights.scalar_type(), c.dtype);
    if (reduce == "queries") {
      expect_near(weights, truth, 2);
    } else {
      expect_rounded_once(weights, truth);
    }
    expect_gradients({weights}, leaves({query, key}, c.options), {truth},
                     leaves({query64, key64}, options64));
  }
}

TEST_P(Half, HardAttention) {
  AttentionOptions options = c.options, soft64 = options64;
  options.sinks(std::nullopt);
  soft64.sinks(std::nullopt);
  const auto [output, index] = hard_attention(query, key, value, options, true);
  const auto [hard64, best] = reference_hard(query64, key64, value64, soft64);
  ASSERT_TRUE(at::equal(index, best));
  EXPECT_TRUE(at::equal(output.to(at::kDouble), hard64));
  const auto soft_output64 = std::get<0>(reference(query64, key64, value64, soft64));
  expect_gradients({output}, leaves({query, key}, options), {soft_output64},
                   leaves({query64, key64}, soft64));
  const auto grad = at::randn_like(hard64).to(c.dtype);
  expect_rounded_once(
      torch::autograd::grad({std::get<0>(hard_attention(query, key, value, options))}, {value},
                            {grad})[0],
      torch::autograd::grad({hard64}, {value64}, {grad.to(at::kDouble)})[0]);
}

INSTANTIATE_TEST_SUITE_P(Cases, Half, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

class HalfSums : public testing::TestWithParam<at::ScalarType> {
 protected:
  const at::ScalarType dtype = GetParam();
  at::Tensor half(at::IntArrayRef shape) const { return randn(shape, dtype); }
};

// A tensor that batch items or heads share gets the sum of their gradients. If the terms were
// rounded before they are added up, its error would be half as large again as that of rounding the
// sum.
TEST_P(HalfSums, OfBroadcastTensors) {
  const auto query = half({1, 4, 9, 8}), key = half({64, 1, 11, 8}), value = half({1, 2, 11, 8});
  const auto grad = half({64, 4, 9, 8}).detach();
  const auto gqa = AttentionOptions().enable_gqa(true);
  const std::vector<at::Tensor> inputs = {query, key, value};
  const std::vector<at::Tensor> exact = {in_double(query), in_double(key), in_double(value)};
  const auto actual = torch::autograd::grad({attention(query, key, value, gqa)}, inputs, {grad});
  const auto truth = torch::autograd::grad({attention(exact[0], exact[1], exact[2], gqa)}, exact,
                                           {grad.to(at::kDouble)});
  for (size_t i = 0; i < inputs.size(); ++i) {
    SCOPED_TRACE(i);
    const auto error = [&](const at::Tensor& t) {
      return (t.to(at::kDouble) - truth[i]).norm().item<double>();
    };
    EXPECT_LE(error(actual[i]), 1.25 * error(truth[i].to(dtype)));
  }
}

TEST_P(HalfSums, OfManyQueriesThatChoseOneKey) {
  const auto query = half({1, 500, 8}).detach(), key = half({1, 1, 8}).detach();
  const auto value = half({1, 1, 8}), grad = at::rand({1, 500, 8}).to(dtype);
  const auto output = std::get<0>(hard_attention(query, key, value));
  expect_rounded_once(torch::autograd::grad({output}, {value}, {grad})[0],
                      grad.to(at::kDouble).sum(-2, true));
}

TEST_P(HalfSums, OfTheWeightsOfManyQueries) {
  const auto query = half({2, 2000, 8}), key = half({2, 5, 8});
  const auto weights64 = reference_weights(in_double(query), in_double(key));
  expect_near(attention_weights(query, key, {}, "queries"), weights64.sum(-2), 1.5);
}

// Where the gradients of all sums are about the same, their differences are not lost.
TEST_P(HalfSums, HaveGradientsThatCancel) {
  const auto query = half({2, 40, 8}), key = half({2, 70, 8});
  const auto query64 = in_double(query), key64 = in_double(key);
  const auto grad = (1 + at::randn({2, 70}) * 0x1p-5).to(dtype);
  const auto sums64 = reference_weights(query64, key64).sum(-2);
  const auto actual =
      torch::autograd::grad({attention_weights(query, key, {}, "queries")}, {query, key}, {grad});
  const auto truth = torch::autograd::grad({sums64}, {query64, key64}, {grad.to(at::kDouble)});
  for (size_t i = 0; i < actual.size(); ++i) expect_near(actual[i], truth[i], 4);
}

TEST_P(HalfSums, VarlenIsAttentionDocumentByDocument) {
  const auto query = half({12, 4, 8}), key = half({16, 2, 8}), value = half({16, 1, 6});
  const auto sinks = half({2, 4});
  const auto options = AttentionOptions().enable_gqa(true).sinks(sinks);
  const auto [output, lse] =
      varlen_attention(query, key, value, at::tensor({0, 5, 12}), at::tensor({0, 9, 16}), options);
  EXPECT_EQ(lse.scalar_type(), at::kFloat);
  std::vector<at::Tensor> outputs, lses;
  const int64_t q[] = {0, 5, 12}, k[] = {0, 9, 16};
  for (int n = 0; n < 2; ++n) {
    const auto rows = [](const at::Tensor& t, int64_t from, int64_t to) {
      return t.slice(0, from, to).transpose(0, 1);
    };
    const auto [o, l] =
        attention_with_lse(rows(query, q[n], q[n + 1]), rows(key, k[n], k[n + 1]),
                           rows(value, k[n], k[n + 1]), AttentionOptions(options).sinks(sinks[n]));
    outputs.push_back(o.transpose(0, 1));
    lses.push_back(l);
  }
  const auto expected = at::cat(outputs);
  EXPECT_TRUE(at::equal(output, expected));
  EXPECT_TRUE(at::equal(lse, at::cat(lses, -1)));
  const auto grad = at::randn_like(output);
  const auto actual = torch::autograd::grad({output}, {query, key, value, sinks}, {grad});
  const auto by_document = torch::autograd::grad({expected}, {query, key, value, sinks}, {grad});
  for (size_t i = 0; i < actual.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_EQ(actual[i].scalar_type(), dtype);
    expect_near(actual[i], by_document[i], 2);
  }
}

// Tensors on foreign memory may begin at any byte, also within what would be an element.
TEST_P(HalfSums, MisalignedTensorsAreCopied) {
  const auto x = half({2, 5, 8}).detach();
  const auto bytes = at::empty({x.numel() * 2 + 1}, at::kByte);
  auto* data = bytes.mutable_data_ptr<uint8_t>() + 1;
  std::memcpy(data, x.const_data_ptr(), x.nbytes());
  const auto shifted = at::from_blob(data, x.sizes(), x.options());
  EXPECT_TRUE(at::equal(attention(shifted, shifted, shifted), attention(x, x, x)));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, HalfSums, testing::Values(at::kBFloat16, at::kHalf),
                         [](const auto& info) { return c10::toString(info.param); });

}  // namespace
}  // namespace qkv::test::half_tests
