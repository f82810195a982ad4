// Packed documents, against one call for each document.
#include <ATen/record_function.h>

#include "common.h"

namespace qkv::test::varlen_tests {
namespace {

constexpr double kTolerance = 1e-12;

struct Documents {
  std::vector<int64_t> queries, keys;  // how many each document has
  std::vector<int64_t> used;           // how many of its keys are used; all, if this is empty
  int64_t before = 0, after = 0;       // rows before the first document and after the last
};

at::Tensor boundaries(const std::vector<int64_t>& lengths, int64_t before, at::ScalarType type) {
  std::vector<int64_t> ends = {before};
  for (const int64_t length : lengths) ends.push_back(ends.back() + length);
  return at::tensor(ends).to(type);
}

class Varlen : public testing::Test {
 protected:
  at::Tensor query, key, value, cu_seq_q, cu_seq_k;
  std::optional<at::Tensor> seqused_k;
  Documents documents;

  void make(const Documents& d, int64_t kv_heads = 4, at::ScalarType type = at::kInt) {
    documents = d;
    cu_seq_q = boundaries(d.queries, d.before, type);
    cu_seq_k = boundaries(d.keys, d.before, type);
    seqused_k.reset();
    if (!d.used.empty()) seqused_k = at::tensor(d.used).to(type);
    query = randn({cu_seq_q[-1].item<int64_t>() + d.after, 4, 8});
    key = randn({cu_seq_k[-1].item<int64_t>() + d.after, kv_heads, 8});
    value = randn({key.size(0), kv_heads, 6});
  }

  // Output and lse of one document after the other by the formula, which is not called for
  // documents without queries or keys.
  std::tuple<at::Tensor, at::Tensor> one_by_one(const AttentionOptions& options) const {
    std::vector<at::Tensor> outputs = {at::zeros({documents.before, 4, 6}, at::kDouble)};
    std::vector<at::Tensor> lses = {at::full({4, documents.before}, -HUGE_VAL, at::kDouble)};
    int64_t q = documents.before, k = documents.before;
    for (size_t n = 0; n < documents.queries.size(); ++n) {
      const int64_t L = documents.queries[n], length = documents.keys[n];
      const int64_t S = documents.used.empty() ? length : documents.used[n];
      AttentionOptions own = options;
      if (const auto& slopes = options.alibi_slopes(); slopes && slopes->dim() == 2)
        own.alibi_slopes(slopes->select(0, int64_t(n)));
      if (L > 0 && S > 0) {
        const auto [output, lse] =
            reference(query.narrow(0, q, L).transpose(0, 1), key.narrow(0, k, S).transpose(0, 1),
                      value.narrow(0, k, S).transpose(0, 1), own);
        outputs.push_back(output.transpose(0, 1));
        lses.push_back(lse);
      } else {
        outputs.push_back(at::zeros({L, 4, 6}, at::kDouble));
        const auto sinks = options.sinks().value_or(at::full({4}, -HUGE_VAL, at::kDouble));
        lses.push_back(sinks.unsqueeze(-1).expand({4, L}));
      }
      q += L;
      k += length;
    }
    outputs.push_back(at::zeros({documents.after, 4, 6}, at::kDouble));
    lses.push_back(at::full({4, documents.after}, -HUGE_VAL, at::kDouble));
    return {at::cat(outputs), at::cat(lses, 1)};
  }

  void expect_one_by_one(const AttentionOptions& options = {}) {
    const auto [output, lse] =
        varlen_attention(query, key, value, cu_seq_q, cu_seq_k, options, seqused_k);
    const auto [expected, expected_lse] = one_by_one(options);
    expect_close(output, expected, kTolerance);
    expect_close(lse, expected_lse, kTolerance);
    const auto loss = [](const at::Tensor& output, const at::Tensor& lse) {
      return output.sin().sum() + lse.where(lse > -HUGE_VAL, 0.0).sin().sum();
    };
    const auto inputs = leaves({query, key, value}, options);
    expect_close(torch::autograd::grad({loss(output, lse)}, inputs),
                 torch::autograd::grad({loss(expected, expected_lse)}, inputs), kTolerance);
  }
};

TEST_F(Varlen, Plain) {
  make({{3, 1, 5}, {4, 2, 3}, {}});
  expect_one_by_one();
}

TEST_F(Varlen, EmptyDocumentsAndRowsOutsideAll) {
  make({{3, 0, 5, 2, 0}, {4, 3, 0, 6, 0}, {}, 2, 3}, 4, at::kLong);
  expect_one_by_one();
  expect_one_by_one(AttentionOptions().sinks(randn({4})));
}

TEST_F(Varlen, OnlyTheFirstKeysAreUsed) {
  make({{3, 2, 5}, {4, 3, 6}, {2, 0, 6}});
  expect_one_by_one();
}

TEST_F(Varlen, OptionsArePerDocument) {
  make({{3, 6, 4}, {5, 6, 7}, {}}, 2);
  expect_one_by_one(AttentionOptions()
                        .enable_gqa(true)
                        .window_size({{3, 1}})
                        .softcap(2)
                        .alibi_slopes(randn({3, 4}))
                        .sinks(randn({4}))
                        .scale(0.3));
  expect_one_by_one(AttentionOptions().enable_gqa(true).is_causal(true));
}

TEST_F(Varlen, KeysLieLikeQueriesByDefault) {
  make({{3, 4}, {3, 4}, {}});
  const auto [output, lse] = varlen_attention(query, key, value, cu_seq_q);
  expect_close(output, std::get<0>(varlen_attention(query, key, value, cu_seq_q, cu_seq_k)), 0);
}

TEST_F(Varlen, NoDocuments) {
  make({{}, {}, {}, 0, 3});
  const auto [output, lse] = varlen_attention(query, key, value, cu_seq_q, cu_seq_k);
  EXPECT_TRUE(output.eq(0).all().item<bool>());
  EXPECT_TRUE(lse.eq(-HUGE_VAL).all().item<bool>());
  for (const auto& gradient : torch::autograd::grad({output.sum()}, {query, key, value}))
    EXPECT_TRUE(gradient.eq(0).all().item<bool>());
}

// Only calls that somebody observes go through the dispatcher, which hands on what is in a schema.
TEST_F(Varlen, PagesAreCausalForAnObserverToo) {
  const at::NoGradGuard no_grad;
  const at::Tensor rows = randn({4, 2, 8}), blocks = randn({3, 4, 2, 8});
  const at::Tensor ends = at::tensor({0, 4}), used = at::tensor({6});
  const at::Tensor table = at::tensor({0, 2}).unsqueeze(0);
  const auto call = [&] {
    return std::get<0>(varlen_attention(rows, blocks, blocks, ends, std::nullopt,
                                        AttentionOptions().is_causal(true), used, table));
  };
  const at::Tensor alone = call();
  const auto observer = at::addThreadLocalCallback(at::RecordFunctionCallback(
      [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> { return nullptr; }));
  const at::Tensor observed = call();
  at::removeCallback(observer);
  EXPECT_TRUE(at::equal(alone, observed));
}

// For dropout document n is batch item n, as if the documents had been padded.
TEST_F(Varlen, DropoutIsThatOfABatch) {
  make({{5, 5}, {7, 7}, {}});
  const auto options = AttentionOptions().dropout_p(0.4);
  const auto batch = [](const at::Tensor& t) { return t.unflatten(0, {2, -1}).transpose(1, 2); };
  torch::manual_seed(3);
  const auto packed = varlen_attention(query, key, value, cu_seq_q, cu_seq_k, options);
  torch::manual_seed(3);
  const auto dense = attention(batch(query), batch(key), batch(value), options);
  expect_close(batch(std::get<0>(packed)), dense, kTolerance);
}

}  // namespace
}  // namespace qkv::test::varlen_tests
